"""Which run this is."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """A run's id, and the name of its folder; the first agent of a run makes both."""

    run_id: str
    folder: str
