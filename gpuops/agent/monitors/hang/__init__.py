"""Hang detection on one node.

A rank is silent when its heartbeat ring did not change for longer than its phase allows
(`timeouts`, learned from this run). `judge` says whether the node's part of the group hangs,
`culprits` which of its ranks holds the others up, `report` what the leader is told, `monitor`
runs these ten times a second and gathers evidence beside the loop. `judge`, `culprits` and
`report` are pure.
"""
