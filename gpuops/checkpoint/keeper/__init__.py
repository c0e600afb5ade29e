"""The keeper: the process of a node that owns the memory of saved states.

It outlives workers and may outlive the agent. One thread serves the socket; long work (hashing,
writing, pushing) runs in jobs.

* `process`: start one, or adopt the one that is there; `serve`: its main function.
* `server`: who may connect, bounds on connections; `requests`: what handles each message.
* `core`: state and decisions without sockets; `jobs`: the threads, whose results tasks await;
  `restore`: what the ranks of a generation load; `replica_checker`: digests of replicated tensors;
  `events`: what happened, until the agent takes it.
* `rank_client`, `agent_client`: the two clients; `connection`: one request at a time, each with a
  deadline; `messages`: the protocol: one JSON object a message, versioned, bounded, checked.

A save: `rank_client.acquire` -> the rank copies -> `seal` -> `core` hashes -> peers and storage.
"""
