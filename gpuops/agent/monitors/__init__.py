"""The monitors of running workers, in addition to their exit codes.

A monitor is an `api.Monitor`: it starts with the workers, receives their heartbeats, returns its
suspicions (`gpuops.incident.suspicion.Suspicion`) ten times a second, returns evidence by a
deadline that all monitors share, and may publish data that an `api.FleetMonitor` judges on the
leader. `gpuops.incident.suspicion` decides by failure class and level which suspicion is the cause.

* `registry`: the list of monitors, and the group that calls all of them.
* `hang`: no step within the learned time limit, and which ranks block the others.
* `gpu`, `gpu_events`: Xid errors of the job's GPUs, and which rank uses which GPU.
* `straggler`: which rank is slower than those that do the same, and why.
* `plugins`, `plugin_process`: detectors of a site (entry points ``gpuops.detectors``), each in a
  separate process, so that a plug-in can block or crash without harm.
* `progress`: steps and saves of the ranks, from their heartbeat rings.
* `fleet`: judges on the leader; records nodes that a monitor suspects without ending anything.
* `preflight`, `gpu_memory`: whether this node may join: health check, free GPU memory.
* `evidence`, `stacks`: samples of workers that are still alive; `rank_state`, `source_line`: what
  they show.
* `recorder`: torch's flight recorder of workers that are alive.
* `step_recorder`: writes down each step, and what the others publish (``--record-steps``).
* `source_line`: what a line that stands in native code waits for.
"""
