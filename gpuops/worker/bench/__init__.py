"""``gpuops ckpt bench``: what saving and restoring costs on this machine.

Saves take turns with a copy of memory and a raw write of the same bytes, so that a slow moment
slows all of them. The benchmark of the source tree, tests/benchmarks/bench_checkpoint.py, uses the
same parts and adds other checkpointers, killed workers, flipped bits and a fetch from a peer.
"""
