"""A tiny data-parallel job that writes the monotonic time of each of its steps.

``stamped.py FOLDER``: rank r of process p appends nanoseconds to ``FOLDER/r.p``. It knows nothing
of who launched it, so that launchers can be compared.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(32, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
path = Path(sys.argv[1]) / f"{os.environ['RANK']}.{os.getpid()}"
with path.open("w") as stamps:
    while True:
        model(torch.randn(8, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        stamps.write(f"{time.monotonic_ns()}\n")
        stamps.flush()
        time.sleep(0.005)
