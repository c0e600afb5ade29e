"""The states of the random number generators of this process."""

import random
import sys
from array import array
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import torch

from gpuops.checkpoint.types import CorruptError


def read_rng() -> dict[str, object]:
    """Return the states of Python's, NumPy's (where it is imported) and torch's generators.

    CUDA's are those of the devices this process uses, by their numbers; reading them waits for no
    device.
    """
    version, state_words, gauss = random.getstate()
    found: dict[str, object] = {
        "python": [version, array("Q", state_words).tobytes(), gauss],
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy"] = numpy.random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        device = torch.cuda.current_device()
        found["cuda"] = {device: torch.cuda.get_rng_state(device).numpy().tobytes()}
    return found


def write_rng(states: Mapping[str, Any]) -> None:
    """Set the generators to *states*.

    A generator of CUDA is set on the device in use now, which need not have the same number.

    Raises:
        CorruptError: They are no states of generators.
    """
    try:
        version, state_words, gauss = states["python"]
        random.setstate((version, tuple(array("Q", state_words)), gauss))
        torch.set_rng_state(_tensor(states["torch"]))
        if "numpy" in states:
            import numpy as np

            np.random.set_state(states["numpy"])  # noqa: NPY002 the one that the job may use
        if "cuda" in states and torch.cuda.is_available():
            for state in states["cuda"].values():
                torch.cuda.set_rng_state(_tensor(state), torch.cuda.current_device())
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as exc:
        raise CorruptError(f"the random states cannot be set: {str(exc)[:200]}") from exc


def reseed(step: int, rank: int, world: int, entropy: bytes) -> None:
    """Seed all generators from where the job is: the same again for the same arguments.

    *entropy* is something of the saved state that differs from job to job.
    """
    text = f"{step} {rank} {world} ".encode() + entropy
    seed = int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1
    random.seed(seed)
    torch.manual_seed(seed)  # CUDA's as well
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
