"""NVML, called in a child process: a faulty driver blocks and can crash its caller.

`session` starts the child and returns `facts.NvmlSnapshot`; the other modules run in it.
``python -m gpuops.host.nvml.facts`` is a second, smaller child.
"""
