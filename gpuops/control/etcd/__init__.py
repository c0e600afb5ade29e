"""The control store in etcd (v3): its address, its HTTP calls, the store.

The client is the standard library over etcd's JSON gateway, which every etcd since 3.4 serves on
its client port. Of the packages, etcd3 was last released in 2020 and needs grpc; etcd3gw is kept,
but calls one member only, limits each read and not a call, and needs three further packages for
the one POST that is used here.

`quorum` decides which nodes of a run hold its record without Postgres, `formation` does what the
agents agree on there, and `handle` is what each of them has of it then. `member` is one of these
etcds, `presence` the store that agents use there: it also knows which agents are connected.
"""
