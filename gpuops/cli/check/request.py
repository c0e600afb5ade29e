"""What ``gpuops check`` and ``gpuops facts`` run, from their options and the environment."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from gpuops.checks.core.runner import CheckRun
from gpuops.config.resolve import Settings
from gpuops.errors import UsageError
from gpuops.gate.session import CheckRequest
from gpuops.host.node_state import node_name
from gpuops.host.trust import current_uid
from gpuops.log import printable
from gpuops.slurm.env import job_of


def metrics(check_run: CheckRun) -> bytes:
    """Return *check_run* in Prometheus' text format."""
    registry = CollectorRegistry()
    status = Gauge(
        "gpuops_check_status",
        "Worst finding of a check about an entity: 0 pass, 1 skip, 2 warn, 3 unknown, 4 fail.",
        ("suite", "check", "entity_kind", "entity_id"),
        registry=registry,
    )
    worst: dict[tuple[str, str, str, str], int] = {}
    for finding in check_run.findings:
        entity = finding.entity
        key = check_run.suite, finding.check, entity.kind.value, printable(entity.id)
        worst[key] = max(worst.get(key, 0), int(finding.status))
    for key, value in worst.items():
        status.labels(*key).set(value)
    single = {
        "gpuops_check_verdict": (
            "Worst finding of the suite: 0 pass, 1 skip, 2 warn, 3 unknown, 4 fail.",
            int(check_run.verdict),
        ),
        "gpuops_check_late": ("Checks that gave no answer in time.", len(check_run.late)),
        "gpuops_check_last_run_timestamp_seconds": (
            "When the suite last ended, in seconds since the epoch.",
            check_run.end_us / 1e6,
        ),
        "gpuops_check_duration_seconds": (
            "How long the suite took, in seconds.",
            (check_run.end_us - check_run.start_us) / 1e6,
        ),
    }
    for name, (about, number) in single.items():
        Gauge(name, about, ("suite",), registry=registry).labels(check_run.suite).set(number)
    return generate_latest(registry)


if TYPE_CHECKING:
    from gpuops.checks.core.recording import Recording

# Each probe may return `gpuops.host.process.probe.OUTPUT_MAX` bytes, and usually returns 1 % of it.
RECORDING_BYTES_MAX = 128 * 2**20
HOOK_TRIGGERS = ("prolog", "epilog")
_GPU = re.compile(
    r"\d{1,4}|GPU-[0-9a-fA-F-]{4,64}|[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.\d"
)


def build_request(
    settings: Settings,
    env: Mapping[str, str],
    *,
    only: tuple[str, ...] = (),
    deadline_s: float | None = None,
    gpus: str = "all",
    trigger: str = "manual",
    job_id: str | None = None,
) -> CheckRequest:
    """Return the request of a command line.

    Raises:
        UsageError: *gpus* is malformed, or *job_id* or *deadline_s* is not a number.
    """
    if job_id is not None and not (job_id.isascii() and job_id.isdecimal()):
        raise UsageError(f"--job {job_id!r}: the id of a Slurm job is a number (SLURM_JOB_ID)")
    if deadline_s is not None and math.isnan(deadline_s):
        raise UsageError("--deadline nan: a number of seconds is expected")
    hook = job_of(env) if trigger in HOOK_TRIGGERS else None
    return CheckRequest(
        suite=settings.suite,
        node=node_name(env),
        root=settings.root,
        state_dir=state_dir(settings),
        uid=current_uid(),
        site_dir=settings.site_dir,
        only=only,
        deadline_s=deadline_s,
        gpus=parse_gpus(gpus, trigger, env),
        gpus_expected=settings.gpus_expected,
        gpus_expected_origin=settings.values["check.gpus_expected"].origin,
        profile=settings.profile,
        trigger=trigger,
        job_id=job_id if job_id is not None or hook is None else hook.id,
        job_uid=None if hook is None else hook.uid,
    )


def read_recording(path: Path) -> "Recording":
    """Return the recording in *path*.

    Raises:
        UsageError: It cannot be read, or is not one.
    """
    from gpuops.checks.core.recording import parse_recording

    try:
        with path.open("rb") as file:
            content = file.read(RECORDING_BYTES_MAX + 1)
    except OSError as exc:
        raise UsageError(f"cannot read {path}: {exc.strerror}") from exc
    if len(content) > RECORDING_BYTES_MAX:
        raise UsageError(f"{path} is not a recording: it has more than {RECORDING_BYTES_MAX} bytes")
    return parse_recording(content.decode("utf-8", errors="replace"), str(path))


def for_recording(
    request: CheckRequest, recording: "Recording", profile: str | None = None
) -> CheckRequest:
    """Return *request* for the recorded node: its name and its configuration.

    The configuration of this machine does not apply; a flag does, as *profile* (``--profile``).
    """
    by_flag = request.gpus_expected_origin == "flag"
    return replace(
        request,
        node=recording.node,
        profile=profile or recording.profile,
        gpus_expected=request.gpus_expected if by_flag else recording.gpus_expected,
        gpus_expected_origin="flag" if by_flag else "recording",
    )


def state_dir(settings: Settings) -> Path:
    """Return the folder of the node's state: a fake root has its own, unless one is configured."""
    if settings.root == Path("/") or settings.values["state.dir"].origin != "default":
        return settings.state_dir
    return settings.root / settings.state_dir.relative_to("/")


def parse_gpus(text: str, trigger: str, env: Mapping[str, str]) -> frozenset[str] | None:
    """Return the GPUs that *text* (``--gpus``) names, by UUID, index or PCI address; None: all.

    ``auto`` is the job's GPUs in a prolog or epilog, from Slurm (``SLURM_JOB_GPUS``, else
    ``CUDA_VISIBLE_DEVICES``); all if neither is set or parseable.

    Raises:
        UsageError: It names something that is not a GPU.
    """
    if text == "all":
        return None
    if text != "auto":
        return _parse_gpu_list(text)
    if trigger not in HOOK_TRIGGERS:
        return None
    job_gpus = job_of(env).gpus
    if job_gpus is not None:
        return job_gpus
    try:
        return _parse_gpu_list(env.get("CUDA_VISIBLE_DEVICES", ""))
    except UsageError:
        return None


def _parse_gpu_list(text: str) -> frozenset[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if _GPU.fullmatch(name) is None:
            raise UsageError(
                f"--gpus {text!r}: {name!r} is not a GPU; use auto, all, or indices, UUIDs (GPU-…)"
                " and PCI addresses (0000:1b:00.0), separated by commas"
            )
    return frozenset(names)
