"""The active tests: one small program each, which measures and prints what it measured.

A program is started as a process of its own (``python -m gpuops.worker.burnin NAME``), so that one
that hangs in the driver can be ended or abandoned. It prints a line of JSON for each
`gpuops.burnin.results.Record` as soon as it has it. What all share is in `program`.
"""
