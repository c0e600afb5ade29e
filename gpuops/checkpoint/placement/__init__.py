"""Which nodes hold copies of which node's state, and what that survives.

`domains` reads failure domains (switches, racks), `replica_placement` assigns holders in groups and
a ring so that few of them share a domain, and leaves existing copies in place where it can,
`survival` computes the probability that all states survive k lost nodes, `estimate` the cost in RAM
and time. Pure functions.
"""
