"""Child processes with deadlines, and inspection of other processes.

* `probe`: run a function that may hang in a child.
* `command`, `run_with_deadline`: other programs, bounded in time and output.
* `together`: several programs at the same time, by lines.
* `sidecar`, `watcher`: children that end with this process.
* `executable`: why a program cannot be executed.
* `inspect`, `pyspy`: the state of a process, its children, its Python stacks.
"""
