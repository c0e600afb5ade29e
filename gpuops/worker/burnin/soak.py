"""Matrix products for a long time: does the device hold its rate, and which clocks has it?"""

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from gpuops.checks.gpu.gpu_throttle import REASON_TEXTS, REASONS
from gpuops.host.nvml.calls import clocks, identity, power, temperatures
from gpuops.host.nvml.facts import NvmlGpu
from gpuops.host.nvml.session import snapshot_here
from gpuops.worker.burnin.gemm import Product, RepeatedProduct, formats_of, multiply, size_of
from gpuops.worker.burnin.program import DeviceUnderTest, Emit, Reporter

TEST = "soak"
EVERY_S = 1.0
# The share of the repeats that are the first, and the last.
_SHARE = 5
_READ_S = 0.9

ReadGpu = Callable[[], NvmlGpu | None]


def measure_soak(
    device: DeviceUnderTest,
    seconds: float,
    emit: Emit,
    read_gpu: ReadGpu | None = None,
    product: Product = multiply,
) -> None:
    """Multiply for *seconds*; compare the last repeats with the first ones.

    Of a GPU *read_gpu* is asked each second. Its clocks are compared with those of its peers like
    any other result; why they are reduced is a note.
    """
    report, name = Reporter(TEST, device.part, emit), formats_of(device)[0]
    repeated = RepeatedProduct(device, name, size_of(device, name), report, product)
    with _sampled(read_gpu) as samples:
        values = repeated.measure(seconds)
    count = max(len(values) // _SHARE, 1)
    first, last = statistics.median(values[:count]), statistics.median(values[-count:])
    report.measured({"kind": "last-to-first"}, [100 * last / first], "%")
    if read_gpu is not None:
        mhz = [x.clocks.sm_mhz for x in samples if x.clocks.sm_mhz]
        if mhz:
            report.measured({"kind": "clock"}, mhz, "MHz")
        report.note(samples_text(samples))


@contextmanager
def _sampled(read_gpu: ReadGpu | None) -> Iterator[Sequence[NvmlGpu]]:
    """Ask *read_gpu* each second in a thread: the device must not wait for an answer."""
    samples: list[NvmlGpu] = []
    done = threading.Event()

    def ask() -> None:
        while read_gpu is not None and not done.wait(EVERY_S):
            found = read_gpu()
            samples.extend([found] if found is not None else [])

    thread = threading.Thread(target=ask, name="nvml", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join(_READ_S)  # a call that hangs does not hold the result


def samples_text(samples: Sequence[NvmlGpu]) -> str:
    """Return what *samples* of a GPU say: highest temperature and power, why clocks are reduced."""
    if not samples:
        return "NVML gave no clocks, power or temperature"
    core_c = [x.temperature.core_c for x in samples if x.temperature.core_c]
    drawn_w = [x.power.drawn_w for x in samples if x.power.drawn_w]
    texts = [f"at most {max(core_c):g} C"] if core_c else []
    texts += [f"at most {max(drawn_w):g} W"] if drawn_w else []
    for name, bit in REASONS.items():
        count = sum(bool((x.clocks.reasons or 0) & bit) for x in samples)
        if count:
            texts.append(f"clocks reduced by {REASON_TEXTS[name]} in {count} of {len(samples)}")
    return f"{len(samples)} samples: {', '.join(texts) or 'nothing reduced the clocks'}"


def reader_of(device: DeviceUnderTest) -> ReadGpu | None:
    """Return what reads the GPU *device* from NVML (None where it is not shown); None of others."""

    def read_gpu() -> NvmlGpu | None:
        until_s = time.monotonic() + _READ_S
        found = snapshot_here(until_s, groups=(identity, clocks, power, temperatures))
        return next((gpu for gpu in found.gpus if gpu.uuid == device.part.id), None)

    return read_gpu if device.is_gpu else None
