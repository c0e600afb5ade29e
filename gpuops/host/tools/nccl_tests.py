"""NVIDIA's nccl-tests: ``all_reduce_perf -J FILE`` (2.16 and later write JSON)."""

from typing import Any

from gpuops.host.tools.run import ToolOutput, ToolRate, measure, rate_of


def measure_all_reduce(tool: str, gpus: int, seconds: float) -> ToolOutput:
    """Measure all_reduce between *gpus* GPUs, of 1 MiB to 1 GiB; see `run.measure`."""
    words = ("-g", str(gpus), "-b", "1M", "-e", "1G", "-f", "32", "-c", "1", "-J")
    return measure(lambda path: [tool, *words, path], parse, seconds)


def parse(document: Any) -> ToolOutput:  # noqa: ANN401 JSON
    """Return the bus bandwidth of each size, out of place, and which sizes had wrong results.

    The output names no version of the tool; that of NCCL counts more.

    Raises:
        LookupError, TypeError, ValueError: It is not as documented.
    """
    rates, faults = [], list[str]()
    for row in document["results"]:
        wrong = [float(row[place]["nwrong"]) for place in ("out_of_place", "in_place")]
        faults += [f"{n:g} of {row['count']} elements were wrong" for n in wrong if n]
        parameters = {
            "tool": "nccl-tests",
            "collective": "all_reduce",
            "ranks": str(document["config"]["ngpus"]),
            "size": f"{int(row['size']) >> 20}MiB",
        }
        rates.append(ToolRate(parameters, (rate_of(row["out_of_place"]["bus_bw"]),)))
    return ToolOutput(f"NCCL {document['nccl_version']}", tuple(rates), tuple(faults))
