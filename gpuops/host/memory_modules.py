"""Memory errors as the kernel counts them, and memory modules as the firmware lists them.

Documentation/admin-guide/RAS of Linux: ``ce_count`` corrected, ``ue_count`` uncorrected errors of
one memory controller since its driver was loaded.

From ``/sys/firmware/dmi/entries/17-*/raw``, which only root may read. The layout is that of DMTF
DSP0134 (System Management BIOS Reference Specification), §7.18 Memory Device.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpuops.errors import ProbeError
from gpuops.host.trust import entries_of, number_of, reason_of, text_of
from gpuops.model import UnknownReason


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryController:
    """One controller; ``dimms`` names its modules that had errors: their label and how many."""

    name: str
    corrected: int
    uncorrected: int
    dimms: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Edac:
    """The controllers; none: their driver is not loaded (as in a virtual machine)."""

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


_TYPE = 17
_SIZE_AT, _LOCATOR_AT, _EXTENDED_AT = 0x0C, 0x10, 0x1C
_UNKNOWN, _EXTENDED, _IN_KIB = 0xFFFF, 0x7FFF, 0x8000
_BYTES_MAX = 4096
_KIB, _MIB = 2**10, 2**20


@dataclass(frozen=True, slots=True)
class Dimm:
    """One slot: its position on the mainboard, and its bytes; 0: empty, None: not reported."""

    locator: str
    size_bytes: int | None


@dataclass(frozen=True, slots=True)
class Dimms:
    """All slots; none: this firmware does not describe them."""

    slots: tuple[Dimm, ...] = ()


def read_dimms(root: Path = Path("/")) -> Dimms:
    """Return the slots.

    Raises:
        ProbeError: They may not be read (``no_permission``).
    """
    slots = []
    for entry in entries_of(root / "sys/firmware/dmi/entries"):
        if not entry.name.startswith(f"{_TYPE}-"):
            continue
        try:
            with (entry / "raw").open("rb") as file:
                slot = parse_memory_device(file.read(_BYTES_MAX))
        except FileNotFoundError:
            continue
        except OSError as exc:
            text = f"cannot read {entry / 'raw'}: {exc.strerror}"
            raise ProbeError(text, UnknownReason(reason_of(exc))) from exc
        if slot is not None:
            slots.append(slot)
    return Dimms(tuple(slots))


def parse_memory_device(raw: bytes) -> Dimm | None:
    """Return the slot that one SMBIOS structure describes, None if it is another structure."""
    if len(raw) < _LOCATOR_AT + 1 or raw[0] != _TYPE or not _LOCATOR_AT < raw[1] <= len(raw):
        return None
    (size,) = struct.unpack_from("<H", raw, _SIZE_AT)
    return Dimm(_string(raw, raw[_LOCATOR_AT]), _size_bytes(raw, size))


def _size_bytes(raw: bytes, size: int) -> int | None:
    if size == _UNKNOWN:
        return None
    if size == _EXTENDED and raw[1] >= _EXTENDED_AT + 4:
        return (int.from_bytes(raw[_EXTENDED_AT : _EXTENDED_AT + 4], "little") & 0x7FFFFFFF) * _MIB
    if size & _IN_KIB:
        return (size & ~_IN_KIB) * _KIB
    return size * _MIB


def _string(raw: bytes, number: int) -> str:
    """Return string *number*, from 1, of those that follow the structure."""
    strings = raw[raw[1] :].split(b"\0")
    if not 0 < number <= len(strings):
        return ""
    return strings[number - 1].decode("ascii", errors="replace").strip()
