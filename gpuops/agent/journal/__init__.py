"""The record of one run: events, incidents and the time they cost.

Everything is written to the run directory first (`run_dir`) and spooled (`gpuops.store.spool`);
`flusher` sends the spool to the store from a thread. Training never waits for the store.

* `session`: opens all of this for one agent.
* `run_journal`: which event is recorded when; `open_incidents`: seconds lost, by phase.
* `event_drafts`, `payloads`: events and what they hold. The keys are a contract.
* `decision_log`: each decision that this agent saw, once.
* `outcome`: how the run ended.
"""
