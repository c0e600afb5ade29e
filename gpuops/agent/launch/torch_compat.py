"""The names of torch that ``gpuops run`` leans on, private ones too.

They are checked before training starts: an unsupported torch must fail loudly there, because a
launcher that supervises half is worse than none.
"""

import importlib
import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

from gpuops.errors import UnsupportedTorchError

# kProcessGroupNCCLDefaultTimeout and kProcessGroupDefaultTimeout; a script may choose others.
NCCL_TIMEOUT_S, GLOO_TIMEOUT_S = 600.0, 1800.0
HEARTBEAT = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
# The monitor aborts a rank whose watchdog is stuck: after the collective's own time-out has had the
# time to dump and to speak. torch's default, 480 s, comes before it.
HEARTBEAT_MARGIN_S = 120.0
_WHY_CHARS_MAX = 400
ENTRIES = "2000"  # torch 2.13's own default
DUMP_PREFIX = "flight_recorder_rank_"
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def heartbeat_s(env: Mapping[str, str], hang_timeout_s: float | None = None) -> float:
    """Return the seconds after which NCCL's monitor aborts a rank with a stuck watchdog."""
    text = env.get(HEARTBEAT, "")
    if text.isdecimal():
        return float(text)
    return max(NCCL_TIMEOUT_S, hang_timeout_s or 0.0) + HEARTBEAT_MARGIN_S


def collective_env(
    env: Mapping[str, str],
    folder: Path,
    *,
    torch_version: str = "",
    hang_timeout_s: float | None = None,
    are_timed: bool = False,
) -> dict[str, str]:
    """Return what is to be added to *env* of the workers; nothing that is there is changed.

    *are_timed*: NCCL times its collectives, by which a slow rank is told from those that wait.
    Dumps of the flight recorder go to *folder*, which is there: one file a rank, its number last.
    """
    wanted = {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        HEARTBEAT: f"{heartbeat_s(env, hang_timeout_s):.0f}",
    }
    if are_timed:
        wanted["TORCH_NCCL_ENABLE_TIMING"] = "1"
    is_old = torch_version.startswith("2.8.")
    # Where both names are set, the newer one wins: an older one that somebody set must stay alone.
    if not any(name in env for name in _SIZES):
        wanted |= dict.fromkeys(_SIZES if is_old else _SIZES[:1], ENTRIES)
    if not any(name in env for name in _FILES):
        wanted |= dict.fromkeys(_FILES if is_old else _FILES[:1], str(folder / DUMP_PREFIX))
    return {name: value for name, value in wanted.items() if name not in env}


_ELASTIC = "torch.distributed.elastic"
NAMES: Mapping[str, tuple[str, ...]] = {
    "torch.distributed": ("HashStore",),
    "torch.distributed.run": ("get_args_parser", "config_from_args"),
    "torch.distributed.launcher.api": ("LaunchConfig",),
    f"{_ELASTIC}.agent.server.api": (
        "Worker",
        "WorkerGroup",
        "WorkerSpec",
        "WorkerState",
        "RunResult.failures",
        "RunResult.is_failed",
        "SimpleElasticAgent._remaining_restarts",
        "SimpleElasticAgent._worker_group",
        "SimpleElasticAgent._rendezvous",
        "SimpleElasticAgent._initialize_workers",
        "SimpleElasticAgent._invoke_run",
        "SimpleElasticAgent._assign_worker_ranks",
        "SimpleElasticAgent.get_event_failed",
        "SimpleElasticAgent.get_event_succeeded",
        "SimpleElasticAgent.get_worker_group",
    ),
    f"{_ELASTIC}.agent.server.local_elastic_agent": (
        "LocalElasticAgent._start_workers",
        "LocalElasticAgent._monitor_workers",
        "LocalElasticAgent._stop_workers",
        "LocalElasticAgent._shutdown",
        "LocalElasticAgent._pcontext",
    ),
    f"{_ELASTIC}.events": ("record",),
    f"{_ELASTIC}.metrics": ("initialize_metrics",),
    f"{_ELASTIC}.metrics.api": ("MetricsConfig",),
    f"{_ELASTIC}.multiprocessing.api": (
        "LogsDest",
        "LogsSpecs.reify",
        "LogsSpecs._redirects",
        "LogsSpecs._tee",
        "LogsSpecs._local_ranks_filter",
        "DefaultLogsSpecs",
        "SignalException",
        "Std.from_str",
        "PContext.close",
        "PContext.pids",
        "SubprocessContext.subprocess_handlers",
        "to_map",
    ),
    f"{_ELASTIC}.rendezvous": ("rendezvous_handler_registry",),
    f"{_ELASTIC}.rendezvous.api": (
        "RendezvousHandler",
        "RendezvousInfo",
        "RendezvousStoreInfo",
    ),
    "torch.optim.optimizer": ("register_optimizer_step_post_hook",),
}


def missing_names(names: Mapping[str, Iterable[str]]) -> list[str]:
    """Return ``module.Name.attribute`` for each name that the installed packages lack."""
    missing = []
    for module_name, paths in names.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            missing.append(module_name)
            continue
        missing += [f"{module_name}.{path}" for path in paths if not _has(module, path)]
    return missing


def _has(owner: object, path: str) -> bool:
    name, _, rest = path.partition(".")
    if hasattr(owner, name):
        return not rest or _has(getattr(owner, name), rest)
    return not rest and name in _instance_names(owner)


def _instance_names(owner: object) -> set[str]:
    """Return what instances of the class *owner* have and it has not: fields, set in __init__."""
    code = getattr(getattr(owner, "__init__", None), "__code__", None)
    return {*getattr(owner, "__dataclass_fields__", ()), *getattr(code, "co_names", ())}


def require_torch() -> str:
    """Return torch's version, once all that we lean on is there.

    Raises:
        UnsupportedTorchError: No torch, one that does not load, or lacks some of `NAMES`.
    """
    if find_spec("torch") is None:
        raise UnsupportedTorchError(
            "`gpuops run` needs torch, which is not installed here; "
            "try: pip install 'torch>=2.8' numpy"
        )
    try:
        version = str(importlib.import_module("torch").__version__)
    except Exception as exc:  # boundary: whatever a broken installation raises
        why = " ".join(str(exc).split())[:_WHY_CHARS_MAX]
        raise UnsupportedTorchError(
            f"`gpuops run` needs torch, and it does not load: {type(exc).__name__}: {why}; repair "
            f"the installation until `{sys.executable} -c 'import torch'` works"
        ) from exc
    missing = missing_names(NAMES)
    if missing:
        raise UnsupportedTorchError(
            f"torch {version} is not supported by this gpuops: it lacks {', '.join(missing)}; "
            "use torch 2.8 or newer, or a newer gpuops"
        )
    return version
