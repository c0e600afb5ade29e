"""Shared memory that holds states, and the table of who may write where.

`shared_buffer` is a memfd that processes share; `state_record` is the life of one state on its
node; `buffer_table` knows which buffer holds which shard and refuses every order of calls that
could tear a complete state; `node_memory` joins them and respects what `available` says of the
machine and its cgroups.
"""
