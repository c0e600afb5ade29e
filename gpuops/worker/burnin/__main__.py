"""``python -m gpuops.worker.burnin TEST --device cpu:0-3 --seconds 60``: one test, measured.

It prints the records of what it found out; the last one says that it came to its end.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from gpuops.burnin.results import ProgramEnd, Record, SoftwareVersions, to_line
from gpuops.host.process.sidecar import die_with_parent
from gpuops.worker.burnin import collectives, gemm, host, links, memory, soak, tools
from gpuops.worker.burnin.program import DeviceUnderTest, Emit, open_device

Run = Callable[[DeviceUnderTest, argparse.Namespace, Emit], None]


def _patterns(device: DeviceUnderTest, options: argparse.Namespace, emit: Emit) -> None:
    size = memory.patterns_bytes(device, options.seconds)
    pieces = memory.MemoryPieces.allocate(device, size)
    memory.measure_patterns(device, options.seconds, pieces, emit)


def _collectives(device: DeviceUnderTest, options: argparse.Namespace, emit: Emit) -> None:
    names = ("rank", "ranks", "node", "meet")
    of = collectives.RankOfNode(**{name: getattr(options, name) for name in names})
    collectives.measure_as_rank(device, of, options.seconds, emit)


def _disk(_device: DeviceUnderTest, options: argparse.Namespace, emit: Emit) -> None:
    for folder in options.folder:
        host.measure_disk(folder, options.seconds / len(options.folder), emit)


RUNS: Mapping[str, Run] = {
    "gemm": lambda device, options, emit: gemm.measure_gemm(device, options.seconds, emit),
    "hbm": lambda device, options, emit: memory.measure_bandwidth(
        device, options.seconds, memory.bandwidth_bytes(device), emit
    ),
    "links": lambda device, options, emit: links.measure_all_links(
        device, options.gpu, options.seconds, emit
    ),
    "collectives": _collectives,
    "host": lambda device, options, emit: host.measure_processors(device, options.seconds, emit),
    "patterns": _patterns,
    "soak": lambda device, options, emit: soak.measure_soak(
        device, options.seconds, emit, soak.reader_of(device)
    ),
    "disk": _disk,
    "tools": lambda device, options, emit: tools.measure_tools(
        device, (options.gpu, options.folder), options.seconds, emit
    ),
}


def main(argv: list[str]) -> int:
    """Measure as *argv* says and print the records; return the exit code."""
    die_with_parent()
    options = _options(argv)
    device = open_device(options.device, options.part)
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda or ""}
    if device.is_gpu:
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    _print(SoftwareVersions(versions={name: text for name, text in versions.items() if text}))
    RUNS[options.test](device, options, _print)
    _print(ProgramEnd(test=options.test))
    return 0


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpuops.worker.burnin", allow_abbrev=False)
    parser.add_argument("test", choices=RUNS)
    parser.add_argument("--device", required=True, help="cuda:N or cpu:LIST")
    parser.add_argument("--part", help="KIND:ID of what its measurements are about")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--ranks", type=int, help="the number of processes, each with its rank")
    parser.add_argument("--node", help="the name of the node that the ranks are on")
    parser.add_argument("--meet", help="a file that does not exist yet, the same of all ranks")
    parser.add_argument("--gpu", action="append", default=[], help="a UUID, as they are visible")
    parser.add_argument("--folder", type=Path, action="append", default=[], help="of a disk")
    return parser.parse_args(argv)


def _print(record: Record) -> None:
    print(to_line(record), flush=True)  # noqa: T201 our output


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
