"""Shared memory that holds states, and the table of who may write where.

`shared_buffer` is a memfd that processes share; `buffer_table` knows which buffer holds which
shard and refuses every order of calls that could tear a complete state; `node_memory` joins both
and respects what `available` says of the machine and its cgroups.
"""
