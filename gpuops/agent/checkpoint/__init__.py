"""The agent's side of checkpoints: the node's keeper, and the agreement between nodes.

A keeper (`gpuops.checkpoint.keeper`) holds the states of one node in memory. This package starts
or adopts it and lets the nodes of a run agree on two questions: is a state saved on all nodes
(*commit*), and which state does the next generation load (*restore*).

* `start`: which kind of checkpointing this run has, and the folder of its keeper; returns a
  `CheckpointService`.
* `api`: `CheckpointService`, which the agent calls; this one keeps nothing.
* `keeper_supervisor`, `keeper_restarts`: the keeper process: started, polled, replaced, ended.
* `follower`, `final_commit`: this node's part in the agreement; `leader`: the leading node's part.
* `rules`, `replica_check`: the rules, as pure functions.
* `messages`: what goes through the control record. Bounded; other nodes are not trusted to be sane.
* `record`, `keeper_events`: what of all this is written into the run's journal.
* `stored_states`: which states the persistent directory has.
* `failure_history`: the failure rate that ``every="auto"`` uses.

A report goes through `follower` -> control record -> `leader` -> `rules` -> control record ->
`follower`, which sends it to the keeper.
"""
