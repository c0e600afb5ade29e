"""Burn-in, pair sweep and learned floors: what active tests measured, and what it means.

Everything here is a pure function of its arguments: no torch, no process, no clock, no file but
the baseline's own. Programs that measure are in `gpuops.worker.burnin`, one small program a test;
each prints lines of JSON (`results`). `gpuops.gate.burnin` runs them on one node.

* `measurement`: repeated results of one test on one part of a node.
* `results`: what a program prints. `plan`: which tests, for how long. `judge`: findings.
* `pairs`, `schedule`: a test of two nodes, and which nodes are tested together in a sweep.
* `speed`, `blame`, `sweep_findings`: which tests were slow, which node or link the outcomes name
  (`pair_graph` finds it), and that as findings. `matrix` draws a sweep as text.
* `history`: the same question to all sweeps of several weeks.
* `baseline`: floors that are learned from a fleet's results; `baseline_file` reads them.

A judge returns findings (`gpuops.model.Finding`); who acts on them is above this layer.
"""
