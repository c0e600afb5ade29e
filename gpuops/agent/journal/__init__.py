"""The record of one run: events, incidents and the time they cost.

Everything is written to the run directory first (`run_dir`) and spooled (`gpuops.store.spool`); a
thread sends the spool to the store. Training never waits for the store.

* `session`: opens all of this for one agent; records decisions, and how the run ended.
* `run_journal`: which event is recorded when; `open_incidents`: seconds lost, by phase.
* `event_drafts`, `payloads`: events and their payloads. The keys are a contract.
"""
