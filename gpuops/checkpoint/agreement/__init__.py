"""Which state a job loads, and whether replicas that must be equal are equal.

`local_recovery` lists what this node can load; `recovery` combines the lists of all nodes into one
restore plan: the state, and which node fetches which shard from where. `replica_check` compares
digests of tensors that must be bitwise equal on data-parallel ranks; `replicated` reads from an
image which tensors those are. All but `local_recovery` is pure.
"""
