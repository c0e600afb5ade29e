"""The agent's side of checkpoints: the node's keeper, and the agreement between nodes.

A keeper (`gpuops.checkpoint.keeper`) holds the states of one node in memory. This package starts
or adopts it and lets the nodes of a run agree on two questions: is a state saved on all nodes
(*commit*), and which state does the next generation load (*restore*).

* `start`: whether this run checkpoints in memory, and the folder of its keeper; returns a
  `CheckpointService`.
* `api`: `CheckpointService`, which the agent calls; the base class keeps nothing.
* `keeper_supervisor`: the keeper process: started, polled, replaced, ended; `keeper_lifecycle`: in
  which phase it is, and what follows it, as pure functions.
* `follower`, `final_commit`: this node's part in the agreement; `leader`: the leader's part;
  `exchange`: how often they exchange what they know.
* `rules`, `generation_plan`, `replica_check`: the rules, as pure functions.
* `sources`: which nodes have which shards of the state to load, in keys of their own.
* `messages`: the messages in the control store, bounded and validated.
* `record`, `keeper_events`: the keeper's events in the run's journal.
* `stored_states`: the states in the persistent directory.
* `failure_history`: the failure rate that ``every="auto"`` uses.

A node's status goes through `follower` -> heartbeat -> `leader` -> `rules` -> commit record ->
`follower`, which sends the decision to the keeper.
"""
