"""The gate: a node is checked, the result is remembered, and Slurm's hooks act on it.

* `hook`: prolog and epilog; `health_check`: HealthCheckProgram. Both run `session`, ask `policy`
  what to do and tell Slurm through `drain`.
* `policy`: may the job start, does the node drain, may it return; pure.
* `recheck`: looks again at failures that can pass by themselves.
* `permit`: the store's leave to drain, a fuse against a rule that would drain the whole cluster.
* `node_state`: what a node remembers between checks, and the file that holds it.
* `record`: the run as events, and what it makes of the node's incidents; `repair`: an operator
  acknowledges a repair.
* `replay`, `install`, `leftovers`: facts judged elsewhere, hooks written, processes on a GPU that
  belong to no job.
"""
