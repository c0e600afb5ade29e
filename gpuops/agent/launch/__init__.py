"""``gpuops run``: from what was typed to a running agent.

`launch.launch` is the entry. In order: `options` and `option_values` read torchrun's flags,
`slurm` and `endpoint` find the other nodes, `planning` puts them together as one `plan.LaunchPlan`
or refuses with the flag, variable or file that is wrong (exit code 2). `preconditions` checks
the script. `assemble` builds the agent of this node from `services`; `torch_config` says to torch
what to run.

* `restart_policy`, `timeouts`: restarts, node counts and time limits, read together.
* `identity`, `job_token`: which run this is, and the secret its agents share.
* `node_context`: node name, folders, rules and store of this node.
* `torch_compat`: every private name of torch that is used, checked at start.
"""
