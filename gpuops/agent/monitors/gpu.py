"""Watches the job's GPUs while its workers run: an Xid that ends the job is known in a second.

A worker whose GPU fell off the bus often hangs instead of failing, and its peers wait for it. What
the hardware or the driver does ends the generation here; what applications cause is kept, and says
what a worker's failure was that follows it. See `gpuops.agent.monitors.gpu_events`.

CUDA shows a process the GPUs of ``CUDA_VISIBLE_DEVICES`` in that order, and frameworks give local
rank N the N-th of them. Its numbers count what the process may open, as NVML does: inside a cgroup
that hides GPUs both begin at 0, so they are one numbering (CUDA C++ Programming Guide, "CUDA
Environment Variables"; on a node of one model ``CUDA_DEVICE_ORDER`` changes nothing). Slurm's own
numbers count the whole node; they are used only where nothing else is known.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuops.agent.monitors.api import Monitor, MonitoredAttempt
from gpuops.agent.monitors.gpu_events import (
    GpuEvent,
    GpuEvents,
    judge_xid,
)
from gpuops.checks.core.xid_catalogue import XidKind, load_xids
from gpuops.errors import GpuopsError
from gpuops.host.clock import Clock
from gpuops.host.gpu_names import GpuName
from gpuops.host.process.watcher import WatchingChild, module_command
from gpuops.host.trust import check_folders, current_uid
from gpuops.host.xid_watch import XidEvent, XidSource, XidSourceEnded, parse_message
from gpuops.incident.kernel import JobXidFilter
from gpuops.incident.suspicion import Suspicion
from gpuops.model import Entity, Evidence

log = logging.getLogger(__name__)

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_OF_SLURM = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
_UUID = "gpu-"
_NUMBERS_MAX = 1024
LINES_A_LOOK = 100  # of each source: a millisecond of work
WAITING_MAX = 1000
# So long may NVML take to say which GPUs this process has (a cold driver takes 10 to 20 s); until
# then it cannot be told whether a line of the kernel's log is about one of them.
NVML_S = 30.0
CLOSE_S = 0.5


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMonitorContext:
    """Where the monitor stands. *env* is the agent's: it names the job's GPUs."""

    node: str
    env: Mapping[str, str]
    root: Path = Path("/")
    site_dir: Path | None = None


def open_gpu_monitor(place: GpuMonitorContext, clock: Clock) -> "GpuMonitor":
    """Return a monitor that listens to NVML and the kernel's log; starts two small processes."""
    children = {
        source: WatchingChild(
            f"xid-{source.value}",
            module_command("gpuops.host.xid_watch", source.value, str(place.root.absolute())),
            place.env,
        )
        for source in XidSource
    }
    return GpuMonitor(place, xid_catalogue(place.site_dir), clock, children)


def xid_catalogue(site_dir: Path | None) -> Mapping[int, XidKind]:
    """Return what Xids mean, by code; without the site's own list where that cannot be read."""
    for folder in (site_dir, None):
        try:
            return load_xids(check_folders(folder, uid=current_uid()).xid)
        except (GpuopsError, OSError) as exc:
            log.warning("the catalogue of Xids cannot be read: %s", exc)
    return {}


class GpuMonitor(Monitor):
    """Inert where there is neither NVML nor a GPU. *sources* are let go of by `close`."""

    name = "gpu"

    def __init__(
        self,
        place: GpuMonitorContext,
        catalogue: Mapping[int, XidKind],
        clock: Clock,
        sources: Mapping[XidSource, WatchingChild],
    ) -> None:
        self._place = place
        self._catalogue = catalogue
        self._clock = clock
        self._sources = dict(sources)
        self._over: set[XidSource] = set()
        self._gpus: dict[XidSource, tuple[GpuName, ...]] = {}
        self._mine: tuple[GpuName, ...] | None = None
        self._own: dict[str, str | None] | None = None  # UUIDs by PCI address
        self._waiting: list[XidEvent] = []
        self._opened_ns = clock.mono_ns()
        self._begun_ns = self._opened_ns
        self._watched: MonitoredAttempt | None = None
        self._signs = GpuEvents()

    @property
    def gpus(self) -> tuple[GpuName, ...]:
        """Return the job's GPUs in CUDA's order, as far as they are known by now."""
        return (self._mine or ()) if self._knows_its_gpus() else ()

    @property
    def listed_uuids(self) -> tuple[str, ...]:
        """Return the UUIDs of the job's GPUs that NVML has listed by now."""
        if XidSource.NVML not in self._gpus:
            return ()
        return tuple(gpu.uuid for gpu in self.gpus if gpu.uuid is not None)

    def rank_gpus(self, local_ranks: Iterable[int]) -> dict[int, str]:
        """Return the UUID of the GPU of each of *local_ranks*, as far as it is known by now."""
        told = self._gpus.get(XidSource.NVML)
        return {} if told is None else rank_gpus(self._place.env, local_ranks, told)

    def begin(self, watched: MonitoredAttempt) -> None:
        """Watch a generation; what comes from before it is no longer its own."""
        self._drain()
        self._watched = watched
        self._signs = GpuEvents()
        self._begun_ns = self._clock.mono_ns()

    def poll(self) -> list[Suspicion]:
        """Return this generation's signs that explain a failure, the gravest first; never waits.

        See `gpuops.agent.monitors.gpu_events` for which end the generation. What came first of a
        GPU is its fault; what else would end the generation follows from that.
        """
        self._drain()
        if self._watched is None:
            return []
        found: dict[tuple[Entity, int], GpuEvent] = {}
        for number, sign in enumerate(self._signs.all()):
            found.setdefault((sign.gpu, -1 if sign.fault.ends else number), sign)
        suspicions = (sign.to_suspicion(self._watched.node) for sign in found.values())
        return [suspicion for suspicion in suspicions if suspicion is not None]

    def evidence(self, deadline_ns: int) -> tuple[Evidence, ...]:  # noqa: ARG002 never waits
        """Return what was seen of the job's GPUs in this generation."""
        self._drain()
        return tuple(sign.to_evidence() for sign in self._signs.all())

    def job_xids(self, since_ns: int | None) -> JobXidFilter | None:
        """Return which Xids of the kernel's log are the job's; None: its GPUs are not known.

        Those of this generation that were last seen before *since_ns* are old.
        """
        self._drain()
        self._knows_its_gpus()
        if self._own is None:
            return None
        from_ns = self._begun_ns if since_ns is None else since_ns
        last: dict[tuple[str, int], int] = {}
        for sign in self._signs.all():
            if sign.address is not None:
                key = sign.address, sign.code
                last[key] = max(last.get(key, 0), sign.last_ns)
        old = frozenset(key for key, last_ns in last.items() if last_ns < from_ns)
        return JobXidFilter(addresses=frozenset(self._own), stale=old)

    def own_uuids(self) -> frozenset[str] | None:
        """Return the UUIDs of all GPUs that are the job's, also of lost ones; None: not known."""
        self._drain()
        self._knows_its_gpus()
        uuids = None if self._own is None else set(self._own.values())
        if uuids is None or None in uuids:
            return None
        return frozenset(uuid for uuid in uuids if uuid is not None)

    def close(self) -> None:
        """End the watching processes."""
        for lines in self._sources.values():
            lines.close(CLOSE_S)

    def _drain(self) -> None:
        """Take what came, and keep what is about this generation."""
        for source, lines in self._sources.items():
            for line in lines.take(LINES_A_LOOK):
                self._hear(source, line)
        if self._waiting and self._knows_its_gpus():
            events, self._waiting = self._waiting, []
            for event in events:
                self._keep(event)

    def _hear(self, source: XidSource, line: bytes) -> None:
        told = parse_message(line)
        if told is None:
            log.debug("%s: not a line of ours: %r", source.value, line[:200])
        elif told.gpus is not None:
            self._gpus[source] = told.gpus
            self._mine = None
        elif told.xid is not None:
            if len(self._waiting) < WAITING_MAX:
                self._waiting.append(told.xid)
        elif told.over is not None:
            log.debug("no Xids from %s: %s", source.value, told.text)
            if told.over is not XidSourceEnded.ERROR:
                self._over.add(source)

    def _knows_its_gpus(self) -> bool:
        if self._mine is not None:
            return True
        told, env = self._gpus, self._place.env
        late = self._clock.mono_ns() - self._opened_ns >= NVML_S * 1e9
        if XidSource.NVML in told:
            self._mine = job_gpus(env, told[XidSource.NVML])
            self._remember(told[XidSource.NVML], self._mine)
        elif XidSource.KERNEL in told and (late or XidSource.NVML in self._over):
            self._mine = job_gpus(env, told[XidSource.KERNEL], whole_node=True)
            self._remember(told[XidSource.KERNEL], self._mine)
        return self._mine is not None

    def _remember(self, listed: Sequence[GpuName], mine: Sequence[GpuName]) -> None:
        """Keep which GPUs are the job's, also one that a later listing has not got.

        NVML leaves out a GPU that is lost, and numbers then name others: such a list says nothing.
        """
        if listed and all(gpu.index == place for place, gpu in enumerate(listed)):
            self._own = {**(self._own or {}), **{gpu.address: gpu.uuid for gpu in mine}}

    def _keep(self, event: XidEvent) -> None:
        """Add *event* to the signs, where it is about the job's GPUs in this generation."""
        gpu = next((gpu for gpu in self.gpus if _is_of(event, gpu)), None)
        if gpu is None or self._watched is None or event.mono_ns < self._begun_ns:
            return
        fault = judge_xid(event, self._catalogue)
        self._signs.add(event, fault, gpu)


def _is_of(event: XidEvent, gpu: GpuName) -> bool:
    same_uuid = gpu.uuid is not None and event.uuid == gpu.uuid
    return same_uuid or event.address == gpu.address
