"""Read hardware profiles (`gpuops.checks.core.profile`) from TOML, and match them to a node."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from gpuops import hostlist
from gpuops.checks.core.check import ValueBounds
from gpuops.checks.core.inherited import base_of, load_inherited, most_specific
from gpuops.checks.core.profile import (
    NO_PROFILE,
    Expectation,
    FlagExpectation,
    NumberExpectation,
    NumbersExpectation,
    Profile,
    ProfileMatch,
    TextExpectation,
)
from gpuops.checks.core.suite import unknown_name
from gpuops.config.resolve import ErrorHandler, raise_error, reject_unknown
from gpuops.errors import ConfigError
from gpuops.resources import data_dir
from gpuops.rules import safe_pattern

# Wider than any machine, and narrow enough to tell bytes from GB and watts from milliwatts.
BOUNDS: Mapping[str, ValueBounds] = MappingProxyType(
    {
        "gpu_count": ValueBounds("GPUs", 1, 128),
        "nvlink_count": ValueBounds("links", 0, 64),
        "pcie_generation": ValueBounds("PCIe generations", 1, 9),
        "pcie_width": ValueBounds("PCIe lanes", 1, 32),
        "power_limit_w": ValueBounds("watts", 10, 10_000, whole=False),
        "sm_clock_mhz_min": ValueBounds("megahertz", 100, 10_000),
        "nic_count": ValueBounds("ports", 0, 128),
        "nic_rate_gbs": ValueBounds("gigabytes a second", 0.1, 150, whole=False),
        "nic_pcie_width": ValueBounds("PCIe lanes", 1, 32),
        "nic_pcie_generation": ValueBounds("PCIe generations", 1, 9),
        "memory_bytes_min": ValueBounds("bytes", 1e9, 1e15),
        "dimm_count": ValueBounds("DIMMs", 1, 512),
        "dimm_bytes": ValueBounds("bytes", 1e9, 1e13),
        "cpu_count": ValueBounds("CPUs", 1, 16_384),
        "nvme_count": ValueBounds("drives", 0, 512),
    }
)
_KINDS = {
    name: next(kind for kind in get_args(hint) if kind is not type(None))
    for name, hint in get_type_hints(Profile).items()
    if {NumberExpectation, NumbersExpectation, TextExpectation, FlagExpectation}
    & set(get_args(hint))
}
# What a text of these keys looks like; Linux allows 15 characters for an interface, and partition 0
# is none.
_TEXTS = {
    "interfaces": (re.compile(r"[^/\s:]{1,15}"), "the name of a network interface"),
    "ib_pkeys": (re.compile(r"0x(?!0*$|8000$)[0-9a-fA-F]{1,4}"), "a P_Key such as 0x8001"),
}
_KEYS = ("about", "inherits", "match", *_KINDS)
_MATCH_KEYS = ("gpu", "gpu_count", "nodes")


def load_profiles(
    directories: Iterable[Path], on_error: ErrorHandler = raise_error
) -> dict[str, Profile]:
    """Return each profile in *directories* by name; of several with one name the last folder's.

    A profile ``inherits`` from one of an earlier folder, which may have its own name.

    Raises:
        ConfigError: Malformed TOML, an unknown key, a value of another type or unit, no source.
    """
    return load_inherited(directories, parse_profile, on_error)


def parse_profile(
    path: Path,
    table: Mapping[str, Any],
    earlier: Mapping[str, Profile],
    on_error: ErrorHandler = raise_error,
) -> Profile:
    """Return the profile in *table* (from *path*), without the keys reported to *on_error*.

    It may inherit from one of *earlier*.

    Raises:
        ConfigError: See `load_profiles`.
    """
    where = f"the profile {path}"
    reject_unknown(table, _KEYS, where, on_error)
    expected: dict[str, Any] = {}
    for key, kind in _KINDS.items():
        if key in table:
            try:
                stated = _expectation(kind, key, table[key])
                expected[key] = replace(stated, is_shipped=path.parent == _shipped_folder())
            except ValueError as exc:
                on_error(ConfigError(f"{key} of {where}: {exc}"))
    if "match" in table:
        expected["match"] = _match(table["match"], f"match of {where}", on_error)
    if "about" in table:
        expected["about"] = str(table["about"])
    base = base_of("profile", table, earlier, where, on_error)
    own = {**expected, "path": str(path), "inherits": "" if base is None else base.name}
    return replace(base or Profile(name=path.stem), name=path.stem, **own)


def _shipped_folder() -> Path:
    return data_dir("checks") / "profiles"


def _expectation(kind: object, key: str, given: object) -> Expectation[Any]:
    if not isinstance(given, dict) or not given.keys() <= {"value", "source"}:
        raise ValueError(f'write it as {{ value = …, source = "…" }}, got {given!r}')
    value, source = given.get("value"), given.get("source")
    if not isinstance(source, str) or not source.strip():
        raise ValueError('it must name the source of its value: source = "…"')
    if kind is NumberExpectation:
        return NumberExpectation(value=BOUNDS[key].check(value), source=source)
    if kind is NumbersExpectation:
        numbers = value if isinstance(value, list) and value else [value]
        return NumbersExpectation(value=tuple(map(BOUNDS[key].check, numbers)), source=source)
    if kind is FlagExpectation:
        if not isinstance(value, bool):
            raise ValueError(f"true or false is expected, got {value!r}")
        return FlagExpectation(value=value, source=source)
    texts = _texts(value)
    pattern, what = _TEXTS.get(key, (None, ""))
    for text in texts:
        if pattern is not None and not pattern.fullmatch(text):
            raise ValueError(f"{what} is expected, got {text!r}")
    return TextExpectation(value=texts, source=source)


def _texts(value: object) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not given:
        raise ValueError(f"a text or a list of texts is expected, got {value!r}")
    if not all(isinstance(item, str) and item for item in given):
        raise ValueError(f"every item must be a text that is not empty, got {value!r}")
    return tuple(given)


def _match(table: object, where: str, on_error: ErrorHandler) -> ProfileMatch:
    if not isinstance(table, dict):
        on_error(ConfigError(f"{where} is a table, got {table!r}"))
        return ProfileMatch()
    reject_unknown(table, _MATCH_KEYS, where, on_error)
    readers = {"gpu": _gpu, "gpu_count": BOUNDS["gpu_count"].check, "nodes": _nodes}
    values: dict[str, Any] = {}
    for key, reader in readers.items():
        if key in table:
            try:
                values[key] = reader(table[key])
            except ValueError as exc:
                on_error(ConfigError(f"{key} of {where}: {exc}"))
    if "gpu_count" in values:
        values["gpu_count"] = int(values["gpu_count"])
    return ProfileMatch(**values)


def _gpu(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"a pattern of the GPU's name is expected, got {value!r}")
    return safe_pattern(value).pattern


def _nodes(value: object) -> tuple[str, ...]:
    patterns = _texts(value)
    for pattern in patterns:
        hostlist.matches(pattern, "")
    return patterns


def profile_for(
    profiles: Mapping[str, Profile],
    *,
    node: str,
    gpu_names: Sequence[str],
    gpu_count: int,
    named: str | None = None,
) -> tuple[Profile, str | None]:
    """Return this node's profile, and what is wrong if none or several match.

    Of a profile and one that inherits from it, the more specific one wins.

    Args:
        profiles: From `load_profiles`.
        node: Its name.
        gpu_names: NVML's name of each GPU; empty if NVML gave none.
        gpu_count: NVIDIA GPUs on the PCI bus.
        named: The profile to use without matching (``check.profile``).

    Raises:
        ConfigError: There is no profile called *named*.
    """
    if named is not None:
        if named not in profiles:
            raise ConfigError(f"check.profile: {unknown_name('profile', named, profiles)}")
        return profiles[named], None
    matching = (x for x in profiles.values() if fits(x.match, node, gpu_names, gpu_count))
    found = most_specific(matching)
    match found:
        case [profile]:
            return profile, None
        case []:
            return NO_PROFILE, _unmatched(gpu_names, gpu_count)
        case _:
            which = " and ".join(f"{item.name!r} ({item.path})" for item in found)
            return NO_PROFILE, (
                f"the profiles {which} all match this node, so none is applied: make one `match`"
                " narrower, or name the right one in check.profile"
            )


def fits(match: ProfileMatch, node: str, gpu_names: Sequence[str], gpu_count: int) -> bool:
    """Return whether *match* covers this node; the arguments are those of `profile_for`."""
    if match == ProfileMatch():
        return False  # Such a profile applies only by its name.
    if match.gpu is not None:
        pattern = re.compile(match.gpu)
        if not gpu_names or not all(pattern.fullmatch(name) for name in gpu_names):
            return False
    if match.gpu_count is not None and match.gpu_count != gpu_count:
        return False
    return not match.nodes or any(hostlist.matches(pattern, node) for pattern in match.nodes)


def _unmatched(gpu_names: Sequence[str], gpu_count: int) -> str | None:
    if not gpu_count and not gpu_names:
        return None
    models = ", ".join(sorted(set(gpu_names))) or "of unknown model"
    return (
        f"no profile matches this node ({gpu_count} GPUs, {models}): it is judged only by"
        " what the devices themselves report"
    )
