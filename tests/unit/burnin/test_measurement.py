"""What is held of repeated results, and which lines of a test program are accepted."""

import math

import pytest

from gpuops.burnin.measurement import Measurement
from gpuops.model import Entity, EntityKind


def measured(*values: float) -> Measurement:
    return Measurement(
        test="gemm",
        part=Entity(EntityKind.GPU, "GPU-1"),
        parameters={"size": "8192", "dtype": "bf16"},
        values=values,
        unit="TFLOP/s",
    )


def test_its_json_loses_nothing() -> None:
    assert Measurement.from_json(measured(700.0, 690.5).to_json()) == measured(700.0, 690.5)


def test_parameters_have_one_text_whatever_their_order() -> None:
    assert measured(1.0).parameters_text == "dtype=bf16 size=8192"


@pytest.mark.parametrize("values", [(), (0.0,), (700.0, math.nan), (math.inf,), (-1.0,)])
def test_zero_nan_and_nothing_are_no_measurement(values: tuple[float, ...]) -> None:
    assert not measured(*values).is_measured


def test_the_spread_is_that_of_the_middle_half() -> None:
    assert measured(98, 99, 100, 101, 102).spread_percent == pytest.approx(2.0)
    assert measured(100).spread_percent == 0


def test_lines_of_another_program_are_not_trusted() -> None:
    line = measured(1.0).to_json()
    for wrong in ({"values": "12"}, {"values": [1.0] * 20_000}, {"values": [None]}, {"part": 3}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            Measurement.from_json({**line, **wrong})
