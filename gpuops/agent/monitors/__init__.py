"""What watches running workers, beside their exit codes.

`registry` is the list of them. A monitor implements `api.Monitor`: it starts with the workers, is
polled ten times a second, may report a failure (`gpuops.incident.decision.NodeReport`) or suspects,
and can be asked for evidence.

* `hang`: no step within the learned time limit, and who holds the others up.
* `gpu`, `gpu_events`: Xid errors of the job's GPUs; `gpu_ranks`: which rank uses which GPU.
* `plugins`, `plugin_process`: detectors of a site (entry points ``gpuops.detectors``), each in a
  process of its own, so that a plug-in can block or crash without harm.
* `progress`: steps and saves of the ranks, from their heartbeat rings.
* `suspects`: nodes that a monitor suspects without ending anything.
* `preflight`, `preflight_result`, `gpu_memory`: may this node join: health check, free GPU memory.
* `rank_state`, `stacks`, `evidence`, `kernel_log`: evidence about workers that still exist.
"""
