"""NVIDIA's nvbandwidth: ``nvbandwidth -j`` (0.5 and later print JSON)."""

from collections.abc import Sequence
from typing import Any

from gpuops.host.tools.run import ToolOutput, ToolRate, measure, rate_of
from gpuops.model import Entity, EntityKind

_TESTS = [f"{way}_memcpy_ce" for way in ("host_to_device", "device_to_host")]
_TESTS += ["device_to_device_memcpy_read_ce"]


def measure_copies(tool: str, gpus: Sequence[str], seconds: float) -> ToolOutput:
    """Measure copies of *gpus* (UUIDs, as they are visible); see `run.measure`."""
    return measure(
        lambda _path: [tool, "-j", "-t", *_TESTS], lambda found: parse(found, gpus), seconds
    )


def parse(document: Any, gpus: Sequence[str]) -> ToolOutput:  # noqa: ANN401 JSON
    """Return the rates of each of *gpus* in each test; a test that does not apply here has none.

    Raises:
        LookupError, TypeError, ValueError: It is not as documented, or a test failed.
    """
    body, rates = document["nvbandwidth"], []
    for case in body["testcases"]:
        if case["status"] == "Waived":  # one GPU has no peer
            continue
        if case["status"] != "Passed" or body.get("error"):
            raise ValueError(f"{case['name']}: {body.get('error') or case['status']}")
        # Columns are GPUs; rows are the host, or the peers of each.
        for number, column in enumerate(zip(*case["bandwidth_matrix"], strict=True)):
            values = tuple(rate_of(cell) for cell in column if cell != "N/A")
            gpu = Entity(EntityKind.GPU, gpus[number])
            rates.append(ToolRate({"tool": "nvbandwidth", "copy": case["name"]}, values, gpu))
    return ToolOutput(str(body["version"]), tuple(rates))
