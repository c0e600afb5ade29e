"""The keeper: the process on a node that owns the memory of saved states.

It outlives workers and may outlive the agent. One thread serves the socket; long work (hashing,
writing, pushing) runs in jobs.

* `process`: start a keeper, or adopt a running one; `serve`: its main function.
* `server`: who may connect, bounds on connections; `requests`: what handles each message.
* `core`: state and decisions without sockets; `jobs`: worker threads, whose results tasks await,
  and the queue of events for the agent; `slot_verifier`: hashes what ranks have written;
  `restore`: what the ranks of a generation load; `replica_checker`: digests of replicated tensors.
* `rank_client`, `agent_client`: the two clients; `connection`: one request at a time, each with a
  deadline; `messages`: the protocol: one JSON object a message, versioned, bounded, checked.

A save: `rank_client.acquire` -> the rank copies, stamps the copy and, if it is not killed before,
  reports it (`mark_written`) -> `slot_verifier` hashes -> peers and storage.
"""
