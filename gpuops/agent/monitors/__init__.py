"""What watches running workers, beside their exit codes.

`registry` is the list of them. A monitor is an `api.Monitor`: it starts with the workers, is fed
their heartbeats, says ten times a second what it suspects (`gpuops.incident.suspicion.Suspicion`),
gives evidence by a deadline that all share, and may publish what an `api.FleetMonitor` judges on
the leader. `group` calls all of them. Which suspicion is the cause is decided in
`gpuops.incident.suspicion`, by failure class and level.

* `hang`: no step within the learned time limit, and who holds the others up.
* `gpu`, `gpu_events`: Xid errors of the job's GPUs; `gpu_ranks`: which rank uses which GPU.
* `plugins`, `plugin_process`: detectors of a site (entry points ``gpuops.detectors``), each in a
  process of its own, so that a plug-in can block or crash without harm.
* `progress`: steps and saves of the ranks, from their heartbeat rings.
* `suspects`: nodes that a monitor suspects without ending anything; `fleet`: on the leader.
* `preflight`, `preflight_result`, `gpu_memory`: may this node join: health check, free GPU memory.
* `rank_state`, `stacks`, `evidence`, `kernel_log`: evidence about workers that still exist.
"""
