"""How a check run works; the checks themselves are in the packages next to this one.

A check (`check.Check`) has a probe, which reads the machine and returns facts, and a judge, a pure
function from facts, parameters and hardware profile to findings. `runner` runs a suite: `probes`
starts each probe in a child process within the deadline of the suite, then every judge runs.

* `suite`, `profile`, `profile_files`, `silence`, `site`: what the site configures (TOML).
* `kernel_rules`, `xid_catalogue`: the kernel log, read once for all checks.
* `recording`, `explain`: facts to a file, to be judged elsewhere; what a check reads and why.

To add a check: one file with ``CHECK = Check(...)``, one line in `gpuops.checks`, its entry in a
suite, its test.
"""
