"""Slow ranks, while the job runs.

`monitor` reads the flight recorders of a node's ranks now and then, and publishes what each did
without waiting, with `signs` of why it may be slow. `fleet` compares all ranks on the leader.
"""
