"""The gate: a node is checked, the result is recorded, and Slurm's hooks act on it.

* `hook`: prolog and epilog; `health_check`: HealthCheckProgram. Both run `session`, decide by
  `policy` and drain the node in Slurm through `drain`.
* `policy`: may the job start, is the node drained, may it be resumed; pure.
* `session`: one check of the node, a second one of failures that may be transient, and facts
  recorded here and judged elsewhere.
* `permit`: the store's permission to drain, and the fuse against a rule that would drain the whole
  cluster.
* `node_state`: the state of a node between checks, and the file that holds it.
* `record`: the run as events, and its effect on the node's incidents; `repair`: an operator
  acknowledges a repair; `install`: writes the hooks.
"""
