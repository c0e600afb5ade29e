"""The spread of numbers of which some may be far off. Pure."""

import statistics
from collections.abc import Iterable

# The median absolute deviation of a normal distribution is 1/1.4826 of its standard deviation.
_MAD_TO_SIGMA = 1.4826


def robust_sigma(values: Iterable[float]) -> float:
    """Return the standard deviation of *values*, by the median of how far each is from theirs."""
    found = [*values]
    middle = statistics.median(found)
    return _MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in found)
