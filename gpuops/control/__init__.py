"""How the agents of one run agree: a small key-value store and one record changed by CAS.

Every agent writes a heartbeat and reads the *control record* (`record.ControlRecord`): generation,
phase, roster, decision. Only the leader writes it, by compare-and-swap, and the leader is simply
the first live one in the succession (`membership`). Two agents that both think they lead do no
harm: one swap fails.

* `store.ControlStore`: put, compare_and_set, heartbeat, list, delete. Four implementations, one
  contract test: `memory` (one node), `tcp` (a process on the head node), `postgres` and `etcd`
  (survive any node).
* `join`: an agent enters; `client.ControlClient`: its threads.
* `leader.Leader`: reads what all agents wrote, calls `step.next_change`, writes what it returns.
* `step.next_change`: what changes next: collect reports, decide, form a roster, stop; pure, like
  the record's `transitions`.
* `membership`: who is alive and who gets a place in the roster.
* `extension`: how checkpoints take part (`gpuops.agent.checkpoint.leader`).
* `drain`: the orderly end; `signing`: the job's token; `kv_map`, `fair_lock`, `keys`: parts.
"""
