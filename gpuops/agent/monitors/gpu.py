"""Watches the job's GPUs while its workers run: a fatal Xid is detected within a second.

A worker whose GPU fell off the bus often hangs instead of failing, and its peers wait for it. An
error of the hardware or the driver ends the generation; one that applications cause is recorded,
and explains a worker's failure that follows it. See `gpuops.agent.monitors.gpu_events`.

CUDA shows a process the GPUs of ``CUDA_VISIBLE_DEVICES`` in that order, and frameworks give local
rank N the N-th of them. Its indices count the devices that the process may open, as NVML's do:
inside a cgroup that hides GPUs both begin at 0, so they agree (CUDA C++ Programming Guide, "CUDA
Environment Variables"; on a node of one model ``CUDA_DEVICE_ORDER`` changes nothing). Slurm's
indices count all GPUs of the node; they are used only where nothing else is known.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gpuops.agent.monitors.api import Monitor, MonitoredAttempt
from gpuops.agent.monitors.gpu_events import GpuEvent, GpuEvents, judge_xid
from gpuops.checks.core.xid_catalogue import XidKind, load_xids
from gpuops.errors import GpuopsError
from gpuops.host.clock import Clock
from gpuops.host.gpu_names import GpuName
from gpuops.host.process.command import module_command
from gpuops.host.process.watcher import WatchingChild
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
LINES_PER_POLL = 100  # of each source: a millisecond of work
PENDING_MAX = 1000
# NVML's time to list the GPUs of this process (a cold driver takes 10 to 20 s); until then it is
# not known whether a line of the kernel log is about one of them.
NVML_S = 30.0
CLOSE_S = 0.5


def job_gpus(
    env: Mapping[str, str], gpus: Sequence[GpuName], *, whole_node: bool = False
) -> tuple[GpuName, ...]:
    """Return those of *gpus* that the job has, in its order.

    *gpus* are all that NVML lists for this process; with *whole_node* all of the node, which
    Slurm's indices count. All are returned where the environment names none, or in an unknown
    format, such as parts of GPUs (MIG): a superset is monitored.
    """
    if whole_node and (numbered := _of_slurm(env, gpus)):
        return numbered
    visible = env.get(_VISIBLE)
    if visible is not None:
        named = _named(visible, gpus)
        return tuple(gpus) if named is None else named
    return _of_slurm(env, gpus) or tuple(gpus)


def _of_slurm(env: Mapping[str, str], gpus: Sequence[GpuName]) -> tuple[GpuName, ...]:
    """Return the GPUs with Slurm's indices; none where the cgroup hides some GPUs already."""
    for name in _OF_SLURM:
        numbers = _numbers(env.get(name, ""))
        if numbers:
            shown = max(numbers) < len(gpus)
            return tuple(gpus[number] for number in numbers) if shown else ()
    return ()


def rank_gpus(
    env: Mapping[str, str], local_ranks: Iterable[int], gpus: Sequence[GpuName]
) -> dict[int, str]:
    """Return the GPU's UUID for each of *local_ranks* that has one, as far as it is known."""
    mine = job_gpus(env, gpus)
    return {
        rank: uuid
        for rank in local_ranks
        if 0 <= rank < len(mine) and (uuid := mine[rank].uuid) is not None
    }


def _named(text: str, gpus: Sequence[GpuName]) -> tuple[GpuName, ...] | None:
    """Return the GPUs that *text* names; None where its format is unknown.

    As in CUDA, everything after the first word that names no GPU is ignored.
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
    # CUDA accepts a unique prefix of a UUID.
    matching = [gpu for gpu in gpus if (gpu.uuid or "").lower().startswith(word)]
    return matching[0] if len(matching) == 1 else None


def _numbers(text: str) -> list[int]:
    """Return the numbers in ``0,2-3``; none for malformed text."""
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


def open_gpu_monitor(
    env: Mapping[str, str], clock: Clock, *, root: Path = Path("/"), site_dir: Path | None = None
) -> "GpuMonitor":
    """Return a monitor of NVML events and the kernel log; starts two small processes.

    *env* is the agent's: it names the job's GPUs.
    """
    children = {
        source: WatchingChild(
            f"xid-{source.value}",
            module_command("gpuops.host.xid_watch", source.value, str(root.absolute())),
            env,
        )
        for source in XidSource
    }
    return GpuMonitor(env, xid_catalogue(site_dir), clock, children)


def xid_catalogue(site_dir: Path | None) -> Mapping[int, XidKind]:
    """Return the catalogue of Xids, by code; without the site's where that cannot be read."""
    for folder in (site_dir, None):
        try:
            return load_xids(check_folders(folder, uid=current_uid()).xid)
        except (GpuopsError, OSError) as exc:
            log.warning("the catalogue of Xids cannot be read: %s", exc)
    return {}


class GpuMonitor(Monitor):
    """Inert where there is neither NVML nor a GPU. `close` ends the *sources*."""

    name = "gpu"

    def __init__(
        self,
        env: Mapping[str, str],
        catalogue: Mapping[int, XidKind],
        clock: Clock,
        sources: Mapping[XidSource, WatchingChild],
    ) -> None:
        self._env = env
        self._catalogue = catalogue
        self._clock = clock
        self._sources = dict(sources)
        self._over: set[XidSource] = set()
        self._gpus: dict[XidSource, tuple[GpuName, ...]] = {}
        self._mine: tuple[GpuName, ...] | None = None
        self._own: dict[str, str | None] | None = None  # UUIDs by PCI address
        self._pending: list[XidEvent] = []
        self._opened_ns = clock.mono_ns()
        self._begun_ns = self._opened_ns
        self._watched: MonitoredAttempt | None = None
        self._events = GpuEvents()

    @property
    def gpus(self) -> tuple[GpuName, ...]:
        """Return the job's GPUs in CUDA's order, () while they are not known."""
        return (self._mine or ()) if self._knows_its_gpus() else ()

    @property
    def listed_uuids(self) -> tuple[str, ...]:
        """Return the UUIDs of the job's GPUs that NVML has listed by now."""
        if XidSource.NVML not in self._gpus:
            return ()
        return tuple(gpu.uuid for gpu in self.gpus if gpu.uuid is not None)

    def rank_gpus(self, local_ranks: Iterable[int]) -> dict[int, str]:
        """Return the UUID of the GPU of each of *local_ranks*, as far as it is known by now."""
        listed = self._gpus.get(XidSource.NVML)
        return {} if listed is None else rank_gpus(self._env, local_ranks, listed)

    def begin(self, watched: MonitoredAttempt) -> None:
        """Watch a generation; earlier events are discarded."""
        self._drain()
        self._watched = watched
        self._events = GpuEvents()
        self._begun_ns = self._clock.mono_ns()

    def poll(self) -> list[Suspicion]:
        """Return this generation's events that explain a failure, the most severe first.

        See `gpuops.agent.monitors.gpu_events` for which end the generation. The first such event of
        a GPU is its fault; later ones follow from it.
        """
        self._drain()
        if self._watched is None:
            return []
        found: dict[tuple[Entity, int], GpuEvent] = {}
        for number, event in enumerate(self._events.all()):
            found.setdefault((event.gpu, -1 if event.fault.ends else number), event)
        suspicions = (event.to_suspicion(self._watched.node) for event in found.values())
        return [suspicion for suspicion in suspicions if suspicion is not None]

    def evidence(self, deadline_ns: int) -> tuple[Evidence, ...]:  # noqa: ARG002 never waits
        """Return the events of the job's GPUs in this generation."""
        self._drain()
        return tuple(event.to_evidence() for event in self._events.all())

    def job_xids(self, since_ns: int | None) -> JobXidFilter | None:
        """Return a filter for Xids of the job in the kernel log; None: its GPUs are not known.

        Those of this generation that last occurred before *since_ns* are stale.
        """
        self._drain()
        self._knows_its_gpus()
        if self._own is None:
            return None
        from_ns = self._begun_ns if since_ns is None else since_ns
        last: dict[tuple[str, int], int] = {}
        for event in self._events.all():
            if event.address is not None:
                key = event.address, event.code
                last[key] = max(last.get(key, 0), event.last_ns)
        stale = frozenset(key for key, last_ns in last.items() if last_ns < from_ns)
        return JobXidFilter(addresses=frozenset(self._own), stale=stale)

    def own_uuids(self) -> frozenset[str] | None:
        """Return the UUIDs of all GPUs of the job, lost ones included; None: not known."""
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
        """Read the sources, and keep the events of this generation."""
        for source, lines in self._sources.items():
            for line in lines.take(LINES_PER_POLL):
                self._handle_line(source, line)
        if self._pending and self._knows_its_gpus():
            events, self._pending = self._pending, []
            for event in events:
                self._add(event)

    def _handle_line(self, source: XidSource, line: bytes) -> None:
        message = parse_message(line)
        if message is None:
            log.debug("%s: malformed line: %r", source.value, line[:200])
        elif message.gpus is not None:
            self._gpus[source] = message.gpus
            self._mine = None
        elif message.xid is not None:
            if len(self._pending) < PENDING_MAX:
                self._pending.append(message.xid)
        elif message.over is not None:
            log.debug("no Xids from %s: %s", source.value, message.text)
            if message.over is not XidSourceEnded.ERROR:
                self._over.add(source)

    def _knows_its_gpus(self) -> bool:
        if self._mine is not None:
            return True
        nvml, kernel = self._gpus.get(XidSource.NVML), self._gpus.get(XidSource.KERNEL)
        late = self._clock.mono_ns() - self._opened_ns >= NVML_S * 1e9
        if nvml is not None:
            self._mine = job_gpus(self._env, nvml)
            self._update_own(nvml, self._mine)
        elif kernel is not None and (late or XidSource.NVML in self._over):
            self._mine = job_gpus(self._env, kernel, whole_node=True)
            self._update_own(kernel, self._mine)
        return self._mine is not None

    def _update_own(self, listed: Sequence[GpuName], mine: Sequence[GpuName]) -> None:
        """Record which GPUs are the job's, and keep those that are missing in a later list.

        NVML omits a GPU that is lost, which shifts the indices: such a list is ignored.
        """
        if listed and all(gpu.index == index for index, gpu in enumerate(listed)):
            self._own = {**(self._own or {}), **{gpu.address: gpu.uuid for gpu in mine}}

    def _add(self, event: XidEvent) -> None:
        """Record *event* if it is about the job's GPUs in this generation."""
        gpu = next((gpu for gpu in self.gpus if _is_of(event, gpu)), None)
        if gpu is None or self._watched is None or event.mono_ns < self._begun_ns:
            return
        self._events.add(event, judge_xid(event, self._catalogue), gpu)


def _is_of(event: XidEvent, gpu: GpuName) -> bool:
    same_uuid = gpu.uuid is not None and event.uuid == gpu.uuid
    return same_uuid or event.address == gpu.address
