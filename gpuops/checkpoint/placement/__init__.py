"""Which nodes hold copies of which node's state, and what that survives.

`domains` reads failure domains (switches, racks), `ring` orders the nodes so that few holders share
a domain, `replica_placement` assigns holders and keeps existing copies where it can, `survival`
computes the probability that all states survive k lost nodes, `ram` and `estimate` what it costs.
Pure functions.
"""
