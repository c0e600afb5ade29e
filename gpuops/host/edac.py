"""Memory errors as the kernel counts them: ``/sys/devices/system/edac/mc``.

Documentation/admin-guide/RAS of Linux: ``ce_count`` corrected, ``ue_count`` uncorrected errors of
one memory controller since its driver was loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpuops.host.small_files import entries_of, number_of, text_of


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryController:
    """One controller; ``dimms`` names its modules that had errors: their label and how many."""

    name: str
    corrected: int
    uncorrected: int
    dimms: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Edac:
    """The controllers; none: no driver of theirs is loaded (a virtual machine)."""

    controllers: tuple[MemoryController, ...] = ()


def read_edac(root: Path = Path("/")) -> Edac:
    """Return the memory controllers and their errors."""
    found = []
    for folder in entries_of(root / "sys/devices/system/edac/mc"):
        corrected, uncorrected = number_of(folder / "ce_count"), number_of(folder / "ue_count")
        if folder.name.startswith("mc") and corrected is not None and uncorrected is not None:
            found.append(
                MemoryController(
                    name=folder.name,
                    corrected=corrected,
                    uncorrected=uncorrected,
                    dimms=_dimms(folder),
                )
            )
    return Edac(tuple(found))


def _dimms(controller: Path) -> Mapping[str, int]:
    dimms = {}
    for folder in entries_of(controller):
        if not folder.name.startswith(("dimm", "rank")):
            continue
        errors = (number_of(folder / "dimm_ce_count") or 0) + (
            number_of(folder / "dimm_ue_count") or 0
        )
        if errors:
            dimms[text_of(folder / "dimm_label") or folder.name] = errors
    return dimms
