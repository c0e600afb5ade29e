"""How many pages of a GPU's memory are retired (Volta and earlier)?"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from gpuops.checks.gpus import LOOK, Untold, Verdict, beyond, counted, each_gpu, span
from gpuops.checks.protocol import Case, Check, Limit
from gpuops.host.gpu_facts import NvmlGpu, RetiredPages
from gpuops.host.gpus import Gpus
from gpuops.model import FailureClass, Finding

_NAME = "gpu_retired_pages"
_beyond = partial(beyond, failure_class=FailureClass.GPU_ROW_REMAP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """``pages`` retired in all; ``pending``: 1 where one waits for a reset."""

    pages: Limit
    pending: Limit


def judge(facts: Gpus, parameters: Parameters, case: Case) -> list[Finding]:
    """Return a finding for each GPU with too many retired pages or one that waits for a reset."""
    return each_gpu(
        _NAME,
        facts,
        case,
        lambda gpu: _one(gpu, parameters),
        _well,
        ("nvmlDeviceGetRetiredPages", "NVML_FI_DEV_RETIRED"),
    )


def _one(gpu: NvmlGpu, parameters: Parameters) -> Sequence[Verdict] | Untold:
    pages = gpu.retired
    if pages is None:
        return Untold() if gpu.remapped is None else ()
    total = _total(pages)
    return [
        *_beyond(parameters.pages, total, f"{total} pages retired", unit="pages"),
        *_beyond(parameters.pending, pages.pending, "a page waits for a reset to be retired"),
    ]


def _total(pages: RetiredPages) -> int:
    return pages.single_bit + pages.double_bit


def _well(gpus: Sequence[NvmlGpu]) -> Verdict:
    retired = [_total(gpu.retired) for gpu in gpus if gpu.retired is not None]
    if not retired:
        return Verdict(message=f"{counted(gpus)} remap rows instead (see gpu_row_remap)")
    return Verdict(
        message=f"{span(retired)} pages retired on {counted(gpus)}, none pending",
        value=max(retired),
        unit="pages",
    )


CHECK = Check(
    name=_NAME,
    about="few retired pages of GPU memory, none pending (before Ampere)",
    look=LOOK,
    parameters=Parameters,
    judge=judge,
)
