"""One generation of workers on one node: start, watch, classify, stop.

* `agent`: the subclass of torch's `LocalElasticAgent`; torch calls it.
* `rendezvous`: torch's rendezvous interface over the control record: wait for a node rank, take it.
* `workers`: starts the worker processes of a generation.
* `attempt`: the loop that watches one generation, ten times a second.
* `exit_watcher`, `exits`: when and how each worker ended.
* `finish`: the end of a generation: evidence, stopping, the report to the leader, the wait for
  its decision. The steps have an order that keeps evidence: collect first, then kill.
* `teardown`: signals to workers, their process groups and what they leave behind.
* `decider`: the decision table of `gpuops.incident.decide`, or the site's override of it.
* `drain`: the orderly end that an operator or Slurm asked for.
* `rings`, `logs`: the heartbeat ring and the log files of each rank.
* `signals`, `supervisor`: the agent's own signals; the parent that restarts a killed agent.
"""
