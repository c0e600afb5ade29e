"""Matrix products: how fast, and whether they are the same bits each time."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gpuops.burnin.measurement import canonical
from gpuops.burnin.results import ResultDigest
from gpuops.worker.burnin.program import (
    DeviceUnderTest,
    Emit,
    Reporter,
    rates,
)

TEST = "gemm"
# The first with bf16 and TF32, and with fp8 (CUDA C++ Programming Guide, compute capabilities).
_AMPERE, _ADA = (8, 0), (8, 9)
_GPU_SIZE = 8192
# Processors without bf16 units emulate it, hundreds of times slower.
_CPU_SIZES = {"fp32": 1024, "bf16": 256}
_BITS = {2: torch.int16, 4: torch.int32}

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]


@dataclass(frozen=True, slots=True)
class Format:
    """A number format: torch's type, and how precise products of fp32 must be."""

    dtype: torch.dtype
    precision: str = "highest"


FORMATS = {
    "bf16": Format(torch.bfloat16),
    "fp16": Format(torch.float16),
    "tf32": Format(torch.float32, "high"),
    "fp32": Format(torch.float32),
    "fp8": Format(torch.float8_e4m3fn),
}


def formats_of(device: DeviceUnderTest) -> tuple[str, ...]:
    """Return the names of the formats that *device* multiplies in hardware."""
    if not device.is_gpu:
        return tuple(_CPU_SIZES)
    capability = torch.cuda.get_device_capability(device.torch_device)
    if capability < _AMPERE:
        return ("fp16", "fp32")
    return tuple(name for name in FORMATS if name != "fp8" or capability >= _ADA)


def size_of(device: DeviceUnderTest, name: str) -> int:
    """Return the number of rows of the matrices that *device* multiplies in the format *name*."""
    return _GPU_SIZE if device.is_gpu else _CPU_SIZES[name]


def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> object:
    """Write the product of *a* and *b* into *out*; of fp8 that of *a* and the transposed *b*."""
    if a.dtype != torch.float8_e4m3fn:
        return torch.matmul(a, b, out=out)
    one = torch.ones((), device=a.device)
    return torch._scaled_mm(a, b.t(), one, one, out_dtype=out.dtype, out=out)  # noqa: SLF001 the only one of fp8


def measure_gemm(
    device: DeviceUnderTest,
    seconds: float,
    emit: Emit,
    product: Product = multiply,
) -> None:
    """Measure square products in each format, each for its share of *seconds*."""
    names, report = formats_of(device), Reporter(TEST, device.part, emit)
    for name in names:
        size = size_of(device, name)
        RepeatedProduct(device, name, size, report, product).measure(seconds / len(names))


class RepeatedProduct:
    """The same square product in one format on one device; of size n it is 2 n³ operations."""

    def __init__(
        self, device: DeviceUnderTest, name: str, size: int, report: Reporter, product: Product
    ) -> None:
        self._device, self._name, self._size = device, name, size
        self._report, self._multiply = report, product
        self._parameters = {"dtype": name, "size": str(size)}
        dtype = FORMATS[name].dtype
        self._a = fixed_matrix(size, 12345, dtype, device.torch_device)
        self._b = fixed_matrix(size, 67890, dtype, device.torch_device)
        out = torch.bfloat16 if name == "fp8" else dtype
        self._first = torch.empty_like(self._a, dtype=out)
        self._out = torch.empty_like(self._first)
        self._differed = False

    def measure(self, seconds: float) -> Sequence[float]:
        """Emit the rate and the digest of the first product; return the rates.

        Later products are compared with the first bit for bit, so that a NaN is equal to itself.
        """
        torch.set_float32_matmul_precision(FORMATS[self._name].precision)
        self._multiply(self._a, self._b, self._first)
        self._device.synchronize()
        values = rates(
            lambda: self._multiply(self._a, self._b, self._out),
            self._device,
            seconds,
            2 * self._size**3 / 1e12,
            self._compare,
        )
        self._report.measured(self._parameters, values, "TFLOP/s")
        self._report.emit(
            ResultDigest(
                test=self._report.test,
                part=self._device.part,
                parameters=canonical(self._parameters),
                model=self._device.model,
                digest=digest_of(self._first),
            )
        )
        return values

    def _compare(self) -> None:
        """Say once if the last product differs from the first."""
        if self._differed:
            return
        bits = _BITS[self._out.element_size()]
        same = self._out.view(bits) == self._first.view(bits)
        if bool(same.all()):
            return
        self._differed = True
        wrong = (~same).nonzero()
        row, column = wrong[0].tolist()
        text = f"the same product differed in {len(wrong)} of {same.numel()} elements between"
        self._report.wrong(
            self._parameters, f"{text} two repeats, first at row {row}, column {column}"
        )


def fixed_matrix(size: int, seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a square matrix of *size* rows of values in [-1, 1), the same on every device.

    A linear congruential sequence in integers: no random number generator differs by device.
    """
    numbers = torch.arange(size * size, dtype=torch.int64, device=device)
    numbers.mul_(1_103_515_245).add_(seed).bitwise_right_shift_(8).bitwise_and_(0x3FF)
    return numbers.sub_(512).to(torch.float32).div_(512).to(dtype).view(size, size)


def digest_of(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of the bytes of *tensor*."""
    return hashlib.sha256(tensor.cpu().view(torch.uint8).numpy().data).hexdigest()
