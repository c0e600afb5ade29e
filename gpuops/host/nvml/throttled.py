"""Prints the UUIDs of the GPUs that hardware, heat or the power brake slows down, as JSON.

A command, because reading NVML forks and the agent has threads. Exits with 3: it is not restarted.
"""

import json
import sys
from functools import reduce
from operator import and_

from gpuops.errors import EXIT_UNKNOWN
from gpuops.host.nvml.facts import SAMPLED_REASONS
from gpuops.host.nvml.session import read_nvml

DEADLINE_S = 4.0


def main() -> int:
    """Print those that are slowed down in each sample; return the exit code."""
    gpus = [gpu for gpu in read_nvml(DEADLINE_S).gpus if gpu.uuid is not None]
    samples = {gpu.uuid: gpu.clocks.samples or (gpu.clocks.reasons or 0,) for gpu in gpus}
    slowed = [uuid for uuid, masks in samples.items() if reduce(and_, masks) & SAMPLED_REASONS]
    sys.stdout.write(json.dumps(slowed) + "\n")
    return EXIT_UNKNOWN


if __name__ == "__main__":
    sys.exit(main())
