"""Links of a node: copies between the host's memory and each GPU, and between GPUs.

One GPU after another: together they would share the host's memory. Where there is no GPU the same
copies are made between buffers of the host's NUMA nodes.
"""

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gpuops.burnin.bandwidth import size_text
from gpuops.checkpoint.memory.numa import numa_node_of
from gpuops.host.trust import text_of
from gpuops.model import Entity, EntityKind
from gpuops.worker.burnin.memory import free_bytes
from gpuops.worker.burnin.program import (
    DeviceUnderTest,
    Emit,
    Reporter,
    open_device,
    parse_cpus,
    rates,
)

TEST = "links"
_GPU_BYTES = 256 * 2**20
_CPU_BYTES = 64 * 2**20

# The processors next to a device and far from it: they allocate and touch the host's buffer.
Places = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class NumaNodes:
    """The processors of each NUMA node that this process may use, and all distances by node."""

    cpus: Mapping[int, Sequence[int]]
    distances: Mapping[int, Mapping[int, int]]

    @classmethod
    def read(cls, root: Path, allowed: Sequence[int]) -> "NumaNodes":
        """Return those of the machine below *root*; none where the kernel does not show them."""
        folders = {
            int(folder.name.removeprefix("node")): folder
            for folder in (root / "sys/devices/system/node").glob("node[0-9]*")
        }
        cpus = {}
        for node, folder in sorted(folders.items()):
            text = text_of(folder / "cpulist")
            cpus[node] = [cpu for cpu in parse_cpus(text) if cpu in allowed] if text else []
        distances = {}
        for node, folder in folders.items():
            found = map(int, (text_of(folder / "distance") or "").split())
            distances[node] = dict(zip(sorted(folders), found, strict=False))
        return cls({node: found for node, found in cpus.items() if found}, distances)

    def places(self, near: int | None) -> Places:
        """Return the processors of the node *near* and of the farthest; of any if it is unknown."""
        if near not in self.cpus or near is None:
            return {"unknown": sorted(itertools.chain(*self.cpus.values()))}
        distance = self.distances.get(near, {})
        far = max(self.cpus, key=lambda node: distance.get(node, 0))
        return {"near": self.cpus[near], **({"far": self.cpus[far]} if far != near else {})}


def measure_links(
    devices: Sequence[tuple[DeviceUnderTest, Places]], seconds: float, emit: Emit
) -> None:
    """Measure the links of *devices*, each with the processors that are next to it or far."""
    gpus = [device for device, _places in devices if device.is_gpu]
    pairs = list(itertools.permutations(gpus, 2))
    works = sum(2 * len(places) for _device, places in devices) + len(gpus) + len(pairs)
    share_s = seconds / works
    torch.set_num_threads(1)  # only this thread is bound to a NUMA node, and touches its memory
    # Kept to the end: what torch page-locked on one node it would hand out again on another.
    buffers: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
    for device, places in devices:
        for numa, cpus in places.items():
            if cpus:
                os.sched_setaffinity(0, cpus)
            if tuple(cpus) not in buffers:
                buffers[tuple(cpus)] = _host_buffers(device)
            _measure_host(device, numa, buffers[tuple(cpus)], share_s, emit)
        if device.is_gpu:
            _measure_launch(device, share_s, emit)
    for source, target in pairs:
        _measure_peer(source, target, share_s, emit)


def _host_buffers(device: DeviceUnderTest) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what is sent and what comes back, page-locked for a GPU, from this NUMA node."""
    size = _GPU_BYTES if device.is_gpu else min(_CPU_BYTES, free_bytes(device) // 4)
    sent = _pattern(size)
    sent = sent.pin_memory() if device.is_gpu else sent
    return sent, torch.zeros_like(sent, pin_memory=device.is_gpu)


def _measure_host(
    device: DeviceUnderTest,
    numa: str,
    buffers: tuple[torch.Tensor, torch.Tensor],
    seconds: float,
    emit: Emit,
) -> None:
    """Measure copies to the device and back, and compare what comes back."""
    kinds = ("h2d", "d2h") if device.is_gpu else ("write", "read")
    host, back = buffers
    back.zero_()
    there = torch.zeros_like(host, device=device.torch_device, pin_memory=False)
    report = Reporter(TEST, device.part, emit)
    for kind, target, source in ((kinds[0], there, host), (kinds[1], back, there)):
        values = _copies(device, target, source, seconds)
        parameters = {"kind": kind, "numa": numa, "size": size_text(len(host))}
        report.measured(parameters, values, "GB/s")
    _compare(report, {"kind": kinds[1], "numa": numa}, back, host)


def _measure_peer(
    source: DeviceUnderTest, target: DeviceUnderTest, seconds: float, emit: Emit
) -> None:
    pattern = _pattern(_GPU_BYTES)
    there = torch.zeros_like(pattern, device=target.torch_device)
    values = _copies(source, there, pattern.to(source.torch_device), seconds)
    direct = torch.cuda.can_device_access_peer(source.torch_device, target.torch_device)
    parameters = {
        "kind": "p2p",
        "path": "direct" if direct else "host",
        "size": size_text(_GPU_BYTES),
    }
    part = Entity(EntityKind.LINK, f"{source.part.id} {target.part.id}")
    report = Reporter(TEST, part, emit)
    report.measured(parameters, values, "GB/s")
    _compare(report, {"kind": "p2p"}, there.cpu(), pattern)


def _measure_launch(device: DeviceUnderTest, seconds: float, emit: Emit) -> None:
    one = torch.zeros(1, device=device.torch_device)
    values = [1e6 / rate for rate in rates(lambda: one.add_(1), device, seconds, 1.0)]
    report = Reporter(TEST, device.part, emit)
    report.measured({"kind": "launch"}, values, "us", higher_is_better=False)


def _pattern(size: int) -> torch.Tensor:
    return torch.arange(251, dtype=torch.uint8).repeat(-(-size // 251))[:size]


def _copies(
    device: DeviceUnderTest, target: torch.Tensor, source: torch.Tensor, seconds: float
) -> Sequence[float]:
    def copy() -> None:
        target.copy_(source, non_blocking=True)

    return rates(copy, device, seconds, target.numel() / 1e9)


def _compare(
    report: Reporter, parameters: Mapping[str, str], found: torch.Tensor, sent: torch.Tensor
) -> None:
    if not torch.equal(found, sent):
        wrong = (found != sent).nonzero()
        text = f"{len(wrong)} of {len(sent)} bytes changed on the way, the first is {int(wrong[0])}"
        report.wrong(parameters, text)


def measure_all_links(
    host: DeviceUnderTest, gpus: Sequence[str], seconds: float, emit: Emit
) -> None:
    """Measure the links of *gpus* (UUIDs, as they are visible), or of the host if there is none."""
    nodes = NumaNodes.read(Path("/"), host.cpus)
    devices = [
        (
            open_device(f"cuda:{number}", f"{EntityKind.GPU}:{uuid}"),
            nodes.places(numa_node_of(torch.cuda.get_device_properties(number))),
        )
        for number, uuid in enumerate(gpus)
    ]
    measure_links(devices or [(host, nodes.places(min(nodes.cpus, default=None)))], seconds, emit)
