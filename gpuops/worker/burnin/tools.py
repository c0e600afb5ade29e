"""Measuring tools of others, as a test: each that is installed and has something to measure."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from gpuops.burnin.plan import TOOLS
from gpuops.burnin.results import SoftwareVersions
from gpuops.errors import ProbeError
from gpuops.host.infiniband import read_fabric
from gpuops.host.tools.fio import measure_disk
from gpuops.host.tools.nccl_tests import measure_all_reduce
from gpuops.host.tools.nvbandwidth import measure_copies
from gpuops.host.tools.perftest import measure_ports, port_pairs
from gpuops.host.tools.run import ToolOutput
from gpuops.model import Entity, EntityKind, UnknownReason
from gpuops.worker.burnin.program import DeviceUnderTest, Emit, Reporter

_Run = Callable[[float], ToolOutput]


def measure_tools(
    device: DeviceUnderTest,
    places: tuple[Sequence[str], Sequence[Path]],
    seconds: float,
    emit: Emit,
) -> None:
    """Run each tool on *places*: the GPUs (UUIDs, as they are visible), and folders of disks."""
    runs = list(_runs(*places))
    node = Reporter("tools", device.part, emit)
    absent = ", ".join(sorted(set(TOOLS) - {name for name, _run in runs}))
    if absent:
        text = f"{absent}: not installed, or nothing here to measure"
        node.not_measured(UnknownReason.NOT_SUPPORTED, text)
    for name, run in runs:
        try:
            output = run(seconds / len(runs))
        except ProbeError as exc:
            node.not_measured(UnknownReason(exc.reason), f"{name}: {exc}")
            continue
        emit(SoftwareVersions(versions={name: output.version}))
        for text in output.wrong:
            between = Entity(EntityKind.LINK, " ".join(places[0]))
            Reporter("tools", between, emit).wrong({"tool": name}, text)
        for rate in output.rates:
            report = Reporter("tools", rate.part or device.part, emit)
            report.measured(rate.parameters, rate.values, "GB/s")


def _runs(gpus: Sequence[str], folders: Sequence[Path]) -> Iterator[tuple[str, _Run]]:
    for name in TOOLS:
        tool = shutil.which(name)
        if tool is None:
            continue
        match name:
            case "all_reduce_perf" if len(gpus) > 1:
                yield name, partial(measure_all_reduce, tool, len(gpus))
            case "nvbandwidth" if gpus:
                yield name, partial(measure_copies, tool, gpus)
            case "fio":
                yield from ((name, partial(measure_disk, tool, folder)) for folder in folders)
            case "ib_write_bw":
                for pair in port_pairs(read_fabric().ports):
                    yield name, partial(measure_ports, tool, pair)
            case _:
                pass
