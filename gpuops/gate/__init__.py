"""The gate: a node is checked, the result is recorded, and Slurm's hooks act on it.

* `hook`: prolog and epilog; `health_check`: HealthCheckProgram. Both run `session`, ask `policy`
  what to do and tell Slurm through `drain`.
* `policy`: may the job start, does the node drain, may it return; pure.
* `session`: one check of the node, a second one of failures that can pass by themselves, and facts
  recorded here and judged elsewhere.
* `permit`: the store's permission to drain, and the fuse against a rule that would drain the whole
  cluster.
* `node_state`: the state of a node between checks, and the file that holds it.
* `record`: the run as events, and how it changes the node's incidents; `repair`: an operator
  acknowledges a repair; `install`: writes the hooks.
"""
