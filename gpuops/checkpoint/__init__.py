"""Training state kept in memory on nodes and on disk: verified, replicated, committed by all nodes.

Nothing here imports torch: the keeper and the operator's commands run without it. `gpuops.worker`
captures a job's state and restores it.

A *state* is (epoch, step). It has one *shard* per rank. A shard is one *image*: a safetensors
file, in memory or on disk, with a digest for each chunk. From saving to loading:

* `memory`: shared memory buffers, and which buffer holds which shard.
* `keeper`: the process of a node that owns those buffers; ranks and the agent connect to it.
* `peers`, `transfer`: copies on other nodes, over TCP.
* `placement`: which node holds copies for which, given failure domains.
* `storage`: states in a directory or an object store, with a manifest that is written last.
* `agreement`: which state all ranks load, and whether replicas of it are equal.
* `image`, `digest`, `manifest`, `types`: the formats and the basic types.
* `sharing`: of what ranks of a node hold alike there is one copy.
"""
