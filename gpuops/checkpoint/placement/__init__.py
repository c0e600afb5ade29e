"""Which nodes hold copies of which node's state, and what that survives.

`domains` reads failure domains (switches, racks), `replica_placement` assigns holders in groups and
a ring so that few of them share a domain, and keeps existing copies where it can, `survival`
computes the probability that all states survive k lost nodes, `estimate` what it costs in RAM and
time. Pure functions.
"""
