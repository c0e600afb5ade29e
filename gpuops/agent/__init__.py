"""The agent of one node: what ``gpuops run`` adds to torch's elastic agent.

One agent runs per node. It is a subclass of torch's `LocalElasticAgent` and follows the control
record of the run (`gpuops.control`). In the order in which a failure meets them:

* `launch`: from flags, environment and Slurm to one plan, and the process that runs it.
* `elastic`: starts the workers of a generation, watches them, classifies how they ended.
* `monitors`: what watches running workers: hangs, GPU errors, plug-ins of a site.
* `checkpoint`: the agent's side of saved states: the keeper of the node, the agreement between
  nodes about which state is committed and which one a restart loads.
* `journal`: the record of the run: events, incidents, time lost.
* `status`: what others can see: ``/metrics``, ``/state``, ``/healthz``, files, the control record.

The agent decides nothing about restarts itself: `gpuops.control.leader` asks
`gpuops.incident.decide`, and each agent does what the control record says.
"""
