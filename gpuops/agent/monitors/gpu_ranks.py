"""Which GPUs are the job's, and which local rank trains on which: as CUDA counts them.

CUDA shows a process the GPUs of ``CUDA_VISIBLE_DEVICES`` in that order, and frameworks give local
rank N the N-th of them. Its numbers count what the process may open, as NVML does: inside a cgroup
that hides GPUs both begin at 0, so they are one numbering (CUDA C++ Programming Guide, "CUDA
Environment Variables"; on a node of one model ``CUDA_DEVICE_ORDER`` changes nothing). Slurm's own
numbers count the whole node; they are taken only where nothing else is told.
"""

from collections.abc import Iterable, Mapping, Sequence

from gpuops.host.gpu_names import GpuName

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_OF_SLURM = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
_UUID = "gpu-"
_NUMBERS_MAX = 1024


def job_gpus(
    env: Mapping[str, str], gpus: Sequence[GpuName], *, whole_node: bool = False
) -> tuple[GpuName, ...]:
    """Return those of *gpus* that the job has, in its order.

    *gpus* are all that NVML tells this process of; with *whole_node* all of the machine, which
    Slurm's numbers count. All of them are returned where the environment names none, or in a way
    that is not understood, as parts of GPUs (MIG) are: rather one too many is watched.
    """
    if whole_node and (numbered := _of_slurm(env, gpus)):
        return numbered
    visible = env.get(_VISIBLE)
    if visible is not None:
        named = _named(visible, gpus)
        return tuple(gpus) if named is None else named
    return _of_slurm(env, gpus) or tuple(gpus)


def _of_slurm(env: Mapping[str, str], gpus: Sequence[GpuName]) -> tuple[GpuName, ...]:
    """Return the GPUs with Slurm's numbers; none where the cgroup has chosen among them already."""
    for name in _OF_SLURM:
        numbers = _numbers(env.get(name, ""))
        if numbers:
            shown = max(numbers) < len(gpus)
            return tuple(gpus[number] for number in numbers) if shown else ()
    return ()


def rank_gpus(
    env: Mapping[str, str], local_ranks: Iterable[int], gpus: Sequence[GpuName]
) -> dict[int, str]:
    """Return the GPU's UUID for each of *local_ranks* that has one, as far as that can be told."""
    mine = job_gpus(env, gpus)
    return {
        rank: uuid
        for rank in local_ranks
        if 0 <= rank < len(mine) and (uuid := mine[rank].uuid) is not None
    }


def _named(text: str, gpus: Sequence[GpuName]) -> tuple[GpuName, ...] | None:
    """Return the GPUs that *text* names; None where it is not understood.

    As CUDA does, what follows the first word that names no GPU is left out.
    """
    words = [word.strip().lower() for word in text.split(",")]
    if words == [""]:
        return ()
    if any(word.startswith("mig-") for word in words):
        return None
    found: list[GpuName] = []
    for word in words:
        gpu = _one(word, gpus)
        if gpu is None:
            break
        found.append(gpu)
    return tuple(dict.fromkeys(found)) if found else None


def _one(word: str, gpus: Sequence[GpuName]) -> GpuName | None:
    if word.isascii() and word.isdecimal():
        number = int(word[:10])
        return gpus[number] if number < len(gpus) else None
    if not word.startswith(_UUID):
        return None
    # CUDA takes the beginning of a UUID where it is the only one.
    matching = [gpu for gpu in gpus if (gpu.uuid or "").lower().startswith(word)]
    return matching[0] if len(matching) == 1 else None


def _numbers(text: str) -> list[int]:
    """Return the numbers in ``0,2-3``; none where there is anything else in it."""
    found: list[int] = []
    for word in text.split(",") if text.isascii() else ():
        first, dash, last = word.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(word) > 9:
            return []
        numbers = range(int(first), int(last if dash else first) + 1)
        if len(numbers) > _NUMBERS_MAX:
            return []
        found += numbers
    return found
