"""``gpuops ckpt bench``: the cost of saving and restoring on this machine.

Saves alternate with a copy of memory and a raw write of the same bytes, so that a slow moment
slows all of them. The benchmark of the source tree, tests/benchmarks/bench_checkpoint.py, uses the
same code and adds other checkpointers, killed workers, flipped bits and a fetch from a peer.
"""
