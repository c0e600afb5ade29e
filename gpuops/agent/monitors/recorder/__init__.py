"""torch's flight recorder, read from workers that are alive.

`gpuops.worker.recorder` has torch serve it on a socket; `reader` asks there, within a deadline and
with bounds, and trusts neither the socket nor the answer.
"""
