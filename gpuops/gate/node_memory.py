"""What a node remembers, from one check to the next; pure. The file is in `state_file`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gpuops.checks.core.check import JudgeContext
from gpuops.checks.core.runner import CheckRun
from gpuops.host.gpus import Gpus
from gpuops.host.node_state import BootMoment, Counters, CounterSample, DriverHang, NodeState
from gpuops.host.nvml.facts import HANG_S, NvmlSnapshot, NvmlStatus
from gpuops.model import Entity

GPUS_LOOK = "gpus"
PROLOG = "prolog"

SAMPLE_EVERY_S = 3600.0
SAMPLE_AGE_MAX_S = 26 * 3600.0
SAMPLES_MAX = 104
JOBS_MAX = 32
JOB_AGE_MAX_S = 30 * 86400.0
HANGS_MAX = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StateUpdate:
    """What a check is for: who asked (``prolog``, ``epilog``, …), and for which Slurm job."""

    trigger: str = "manual"
    job_id: str | None = None


def case_of(
    state: NodeState,
    *,
    node: Entity,
    moment: BootMoment,
    errand: StateUpdate,
    gpus: frozenset[str] | None = None,
) -> JudgeContext:
    """Return what judges know of *node* at *moment*.

    After a job the counters' baseline is what they were at that job's prolog, where that is known.
    """
    own = None if errand.trigger == PROLOG else state.jobs.get(errand.job_id or "")
    counters = Counters(
        boot_id=moment.boot_id,
        since_boot_s=moment.since_boot_s,
        t_us=moment.t_us,
        samples=(own,) if own is not None else state.samples,
    )
    return JudgeContext(
        node=node,
        counters=counters if moment.boot_id else Counters(),
        gpus=gpus,
        hangs=tuple(hang for hang in state.hangs if hang.boot_id == moment.boot_id != ""),
        persistence=state.persistence,
        repairs=state.repairs,
        strikes=state.strikes,
        boot_us=moment.t_us - round(moment.since_boot_s * 1e6),
    )


def state_after(
    state: NodeState, ran: CheckRun, *, moment: BootMoment, errand: StateUpdate
) -> NodeState:
    """Return what the node remembers once *ran*, begun at *moment*, is over."""
    if not moment.boot_id:
        return state
    gpus = ran.facts.get(GPUS_LOOK)
    if isinstance(gpus, Gpus):
        state = _after_nvml(state, gpus.nvml, moment)
        state = replace(state, profile=ran.profile)
    sample = CounterSample(
        boot_id=moment.boot_id,
        since_boot_s=moment.since_boot_s,
        t_us=moment.t_us,
        values=dict(ran.counters),
    )
    return replace(
        state,
        samples=_samples(state.samples, sample, moment),
        jobs=_jobs(state.jobs, sample, moment, errand),
    )


def _samples(
    samples: tuple[CounterSample, ...], now: CounterSample, moment: BootMoment
) -> tuple[CounterSample, ...]:
    """Return *samples* with those counters of *now* that none younger than an hour holds.

    By counter, so that a suite that reads few does not put off the others' samples.
    """
    kept = tuple(item for item in samples if _is_kept(item, moment))
    recent = {
        name
        for item in kept
        if item.boot_id == now.boot_id and moment.age_s(item) < SAMPLE_EVERY_S
        for name in item.values
    }
    due = {name: value for name, value in now.values.items() if name not in recent}
    if due:
        kept = (*kept, replace(now, values=due))
    return kept[-SAMPLES_MAX:]


def _is_kept(sample: CounterSample, moment: BootMoment) -> bool:
    """A boot has no samples from its own future; an earlier boot's clock may have been wrong."""
    age_s = moment.age_s(sample)
    return age_s <= SAMPLE_AGE_MAX_S and (age_s >= 0 or sample.boot_id != moment.boot_id)


def _jobs(
    jobs: Mapping[str, CounterSample], now: CounterSample, moment: BootMoment, errand: StateUpdate
) -> Mapping[str, CounterSample]:
    """Return *jobs* with this prolog's or without this epilog's; no job outlives its boot."""
    kept = {
        job_id: sample
        for job_id, sample in jobs.items()
        if sample.boot_id == moment.boot_id
        and 0 <= moment.age_s(sample) <= JOB_AGE_MAX_S
        and not (errand.trigger == "epilog" and job_id == errand.job_id)
    }
    if errand.trigger == PROLOG and errand.job_id:
        kept.pop(errand.job_id, None)
        kept[errand.job_id] = now
    return dict(list(kept.items())[-JOBS_MAX:])


def _after_nvml(state: NodeState, nvml: NvmlSnapshot, moment: BootMoment) -> NodeState:
    """Return *state* with one more hang of the driver, or with none: it answered."""
    told = [gpu.modes.persistence for gpu in nvml.gpus if gpu.modes.persistence is not None]
    if told:
        state = replace(state, persistence=all(told))
    silent = [(nvml.hang, nvml.hung_s), *((gpu.hung_call, gpu.hung_s) for gpu in nvml.gpus)]
    calls = [(call, waited_s) for call, waited_s in silent if call is not None]
    hung = [call for call, waited_s in calls if waited_s is None or waited_s >= HANG_S]
    if hung:
        hang = DriverHang(boot_id=moment.boot_id, t_us=moment.t_us, call=hung[0], state=nvml.state)
        earlier = tuple(item for item in state.hangs if item.boot_id == moment.boot_id)
        return replace(state, hangs=(*earlier, hang)[-HANGS_MAX:])
    if not calls and nvml.status in {NvmlStatus.OK, NvmlStatus.ERROR}:
        return replace(state, hangs=())
    return state
