"""The control store in a Postgres table, so that any one node may be lost.

`store` implements `gpuops.control.store.ControlStore`, `sql` has its statements, `session` keeps a
connection and a deadline for every call.
"""
