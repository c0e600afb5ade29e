"""Child processes with deadlines, and processes looked at from outside.

* `probe`: run a function that may hang in a child. `abandoned`: children that no signal ends.
* `command`, `bounded_command`, `run_with_deadline`: programs of others, bounded in time and output.
* `sidecar`, `watcher`, `die_with_parent`: children that live as long as we do.
* `inspect`, `env_tagged`, `pyspy`: what a process does, whose it is, its Python stacks.
"""
