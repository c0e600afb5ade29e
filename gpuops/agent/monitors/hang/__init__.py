"""Hang detection on one node.

A rank is silent when its heartbeat ring did not change for longer than its phase allows
(`timeouts`, learned from this run). `judge` says whether the node's part of the group hangs,
`report` which of its ranks blocks the others and what the leader receives, `monitor` runs these ten
times a second and collects evidence in a thread. `patience` says when a limit may be too short for
a healthy job. All but `monitor` are pure.
"""
