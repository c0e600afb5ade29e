"""The pair sweep at run time: every node tests its link to others, one coordinator decides.

The nodes meet at a control store (`gpuops.control.tcp`), whose server the first node starts. The
coordinator (`coordinator`) writes each round's orders there, waits for the reports and judges; the
participants (`participant`) obey and judge nothing, so no two nodes can disagree about a round.

* ``alive/NODE``: a participant's heartbeat and what it is (`messages.Participant`); the store
  removes it when the participant's connection closes.
* ``coordinator``: the coordinator's heartbeat; without it every participant ends.
* ``step``: the number of the current step, or that the sweep is over.
* ``order/STEP/NODE``, ``port/STEP/NODE``, ``report/STEP/NODE``: what a node has to test, where the
  first node of the pair listens, and what came of it.
* ``finding/NODE``: what the sweep found about a node, for the node itself to record and act on;
  ``left/NODE``: it has read that. Only then the store may end.

A pair test is `gpuops.worker.burnin.pair`, a process of its own for each device (`pair_test`). A
participant that is over its time ends its own processes only, and the sweep goes on.
"""
