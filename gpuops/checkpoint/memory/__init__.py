"""Shared memory that holds states, and the table that decides who may write where.

`shared_buffer` is a memfd that processes share; `state_record` is the life of one state on its
node; `buffer_table` records which buffer holds which shard and refuses calls that could overwrite
a complete state; `copy_stamp` says which copy is complete; `node_memory` combines them within what
`available` reports for the machine and its cgroups.
"""
