"""What is free to look at of a rank that may be slow: what its host did to it. Reads ``/proc``.

Each is a share of the time since the last look: of a thread that was ready and had no processor
(``/proc/PID/task/TID/schedstat``, which includes throttling by a cgroup), of the host's tasks that
waited for memory, swap included (``/proc/pressure/memory``), and of processor time that the
hypervisor kept (steal in ``/proc/stat``). Sources: Documentation/scheduler/sched-stats.rst,
Documentation/accounting/psi.rst, proc_stat(5).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpuops.host.infiniband import read_fabric
from gpuops.host.process.command import module_command
from gpuops.host.process.watcher import WatchingChild
from gpuops.host.trust import entries_of, text_of

# The share of time, and the number of errors, as they are published.
CPU, MEMORY, STEAL, ERRORS, THROTTLED = "cpu", "memory", "steal", "errors", "throttled"
_NIC_ERRORS = ("error", "discard", "link_down", "retrans", "timeout", "carrier_downs")


@dataclass(slots=True)
class HostSigns:
    """Looks at ranks by their processes; the first look at one has nothing to compare with."""

    root: Path
    _before: dict[str, float] = field(default_factory=dict)

    def look(self, pids: Mapping[int, int], now_s: float) -> dict[int, dict[str, float]]:
        """Return the signs of each rank since the last look; those that are 0 are left out."""
        before, self._before = self._before, self._read(pids, now_s)
        span_s = now_s - before.get("at", now_s)
        if span_s <= 0:
            return {rank: {} for rank in pids}
        deltas = {
            name: value - before[name] for name, value in self._before.items() if name in before
        }
        host = {
            MEMORY: deltas.get(MEMORY, 0.0) / span_s,
            STEAL: deltas.get(STEAL, 0.0) / max(deltas.get("ticks", 0.0), 1.0),
            ERRORS: deltas.get(ERRORS, 0.0),
        }
        found = {}
        for rank, pid in pids.items():
            waits = [delta for name, delta in deltas.items() if name.startswith(f"{pid}/")]
            signs = {CPU: max(waits, default=0.0) / span_s, **host}
            found[rank] = {name: round(x, 3) for name, x in signs.items() if x >= 0.001}
        return found

    def _read(self, pids: Mapping[int, int], now_s: float) -> dict[str, float]:
        ports = read_fabric(self.root).ports
        counters = (item for port in ports for item in port.counters.items())
        errors = sum(n for name, n in counters if any(word in name for word in _NIC_ERRORS))
        found = {"at": now_s, ERRORS: float(errors)}
        pressure = (text_of(self.root / "proc/pressure/memory") or "").partition("total=")[2]
        if pressure.split():
            found[MEMORY] = float(pressure.split()[0]) / 1e6
        ticks = (text_of(self.root / "proc/stat") or "").partition("\n")[0].split()[1:9]
        if len(ticks) == 8:
            found |= {"ticks": float(sum(map(int, ticks))), STEAL: float(ticks[7])}
        for pid in pids.values():
            for task in entries_of(self.root / f"proc/{pid}/task"):
                words = (text_of(task / "schedstat") or "").split()
                if len(words) == 3:
                    found[f"{pid}/{task.name}"] = float(words[1]) / 1e9
        return found


def throttled_gpus(env: Mapping[str, str], deadline_s: float) -> frozenset[str]:
    """Return the UUIDs of the GPUs that are slowed down at present; none if NVML does not say."""
    command = module_command("gpuops.host.nvml.throttled")
    child = WatchingChild("gpu-throttled", command, env, restarts_max=0)
    child.given_up.wait(deadline_s)
    child.close()
    try:
        return frozenset(json.loads(child.take()[0]))
    except (IndexError, ValueError, TypeError):
        return frozenset()
