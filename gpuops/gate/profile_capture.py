"""A hardware profile of a node that is known to be good, from the facts of its checks.

`ROWS` has a line for each key of a profile. A new check that judges another key needs one line
there. Nothing is captured from a node that the checks find fault with (`objections`), and the new
profile is judged on the same facts before it is returned.
"""

import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from gpuops.checks import check_named
from gpuops.checks.core.profile import NO_PROFILE, Profile, TextExpectation
from gpuops.checks.core.profile_files import BOUNDS, load_profiles, parse_profile, profile_for
from gpuops.checks.core.runner import CheckRun
from gpuops.checks.gpu.gpu_modes import COMPUTE_MODES
from gpuops.errors import GpuopsError
from gpuops.gate.session import (
    CheckPlan,
    ProfileSelector,
    judge_recording,
    names_and_count,
    record_facts,
)
from gpuops.host.clock import Clock
from gpuops.host.gpu_names import Gpus
from gpuops.host.infiniband import RdmaPorts
from gpuops.host.net.interfaces import Interfaces
from gpuops.host.nvml.facts import NvmlGpu
from gpuops.host.pci.nic_link import NicPcieLinks
from gpuops.host.storage.mounts import Filesystems, MountAnswer, is_ignored, read_mounts
from gpuops.model import Finding, Status
from gpuops.resources import data_dir
from gpuops.units import iso_utc

T = TypeVar("T", bound=Hashable)
Value = float | bool | tuple[str, ...] | tuple[float, ...] | None

# Kernel and firmware keep a share of the memory that differs by version and setting; one module of
# 32 is more than twice as much.
_MEMORY_SHARE = 0.985
# Those that run permanently and that jobs need; what does not run here is left out.
CANDIDATES = Profile(
    name="candidates",
    services=TextExpectation(
        value=(
            "munge",
            "slurmd",
            "chronyd",
            "chrony",
            "ntpd",
            "systemd-timesyncd",
            "sssd",
            "nslcd",
            "docker",
            "containerd",
            "nvidia-fabricmanager",
            "nvidia-persistenced",
            "nvidia-imex",
            "nvidia-dcgm",
        ),
        source="candidates",
    ),
    kernel_modules=TextExpectation(
        value=("nvidia", "nvidia_uvm", "nvidia_peermem", "nvidia_fs", "gdrdrv", "ib_uverbs"),
        source="candidates",
    ),
)
_RUNNING = frozenset({"active", "reloading", "refreshing"})
# Removable media, containers, users' and the system's own: no job needs them.
_NOT_REQUIRED: tuple[str, ...] = (
    "/",
    "/boot*",
    "/media/*",
    "/run/*",
    "/snap/*",
    "/mnt/cdrom*",
    "/var/lib/docker/*",
    "/var/lib/containers/*",
    "/var/lib/kubelet/*",
    "/etc/*",
)
# systemd.net-naming-scheme(7): the name of an interface by its hardware address.
_NAMED_BY_ADDRESS = re.compile(r"(en|ib|sl|wl|ww)x[0-9a-f]{12}")
_NOT_DISKS = ("/dev/loop*", "/dev/sr*", "/dev/fuse")


@dataclass(frozen=True, slots=True)
class CaptureRow:
    """How one key is filled in: by the facts of ``check``; ``value`` returns None for "nothing"."""

    key: str
    check: str
    value: Callable[[Any], Value]


def _same(values: Iterable[T | None]) -> T | None:
    """Return the one value that all have, None if they differ or one is unknown."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


def _least(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return min((item for item in known if item is not None), default=None)


def _of_gpus(value: Callable[[NvmlGpu], Any]) -> Callable[[Gpus], Any]:
    return lambda facts: _same(value(gpu) for gpu in facts.nvml.gpus)


def _texts(values: Iterable[str | None]) -> tuple[str, ...] | None:
    return tuple(sorted({item for item in values if item})) or None


def _nvlinks(gpu: NvmlGpu) -> int | None:
    return None if gpu.nvlinks is None else sum(link.active is True for link in gpu.nvlinks)


def _clock(gpu: NvmlGpu) -> int | None:
    application = gpu.clocks.sm_application_mhz
    return gpu.clocks.sm_max_mhz if application is None else application


def _joined(gpu: NvmlGpu) -> bool | None:
    # nvml.h: NVML_GPU_FABRIC_STATE_COMPLETED.
    return True if gpu.fabric is not None and gpu.fabric.state == 3 else None


def _compute(facts: Gpus) -> Value:
    mode = COMPUTE_MODES.get(_of_gpus(lambda gpu: gpu.modes.compute)(facts))
    return None if mode is None else (mode,)


def _adapters(facts: RdmaPorts) -> int | None:
    return len({port.guid for port in facts.ports if port.is_active}) or None


def _rates(facts: RdmaPorts) -> Value:
    """Return the rate of each adapter in use, the fastest first; one number if all have the same.

    The least of them would hide a fast one that fell to the rate of a slow one.
    """
    rates: dict[str, float] = {}
    for port in facts.ports:
        if port.is_active:
            rates[port.guid] = max(port.rate_gbs or 0.0, rates.get(port.guid, 0.0))
    if len(set(rates.values())) < 2:
        return _same(rates.values()) or None
    return tuple(sorted(rates.values(), reverse=True))


def _interfaces(facts: Interfaces) -> Value:
    """Return those with a link; not those whose name has an address, which no other node has.

    Nor those on USB: there the BMC shows an interface, which goes when it restarts. A bond stands
    for its slaves, one of which may be lost.
    """
    slaves = {name for bond in facts.bonds for name in bond.slaves}
    bonds = {bond.name for bond in facts.bonds if bond.slaves}
    return _texts(
        item.name
        for item in facts.interfaces
        if (item.name in bonds or (item.is_physical and item.name not in slaves))
        and item.has_link
        and not item.is_usb
        and not _NAMED_BY_ADDRESS.fullmatch(item.name)
    )


def _nic_link(of: str) -> Callable[[NicPcieLinks], float | None]:
    """Return what all RDMA adapters have; the least of several would hide a degraded one.

    None too if another adapter has less than it supports, which the profile would then fail.
    """

    def value(facts: NicPcieLinks) -> float | None:
        common: int | None = _same(
            getattr(link.now, of) for link in facts.links if link.guid is not None
        )
        if common is None:
            return None
        links = [(getattr(link.now, of), getattr(link.adapter, of)) for link in facts.links]
        is_slower = any(now and now < common <= (most or common) for now, most in links)
        return None if is_slower else common

    return value


def _mounts(facts: Filesystems) -> Value:
    return _texts(item.mount.point for item in facts.answers if _is_required(item))


def _is_required(answer: MountAnswer) -> bool:
    mount = answer.mount
    is_disk = mount.source.startswith("/dev/") or mount.filesystem == "zfs"
    if answer.space is None or answer.is_a_users(()) or not (is_disk or mount.is_network):
        return False
    return not is_ignored(mount.point, _NOT_REQUIRED) and not is_ignored(mount.source, _NOT_DISKS)


ROWS = (
    CaptureRow("gpu_count", "gpu_count", lambda facts: len(facts.nvml.gpus) or None),
    CaptureRow("nvlink_count", "nvlink", _of_gpus(_nvlinks)),
    CaptureRow("pcie_generation", "gpu_pcie_link", _of_gpus(lambda gpu: gpu.pcie.generation_max)),
    CaptureRow("pcie_width", "gpu_pcie_link", _of_gpus(lambda gpu: gpu.pcie.width)),
    CaptureRow("power_limit_w", "gpu_power", _of_gpus(lambda gpu: gpu.power.limit_w)),
    CaptureRow("sm_clock_mhz_min", "gpu_clocks", _of_gpus(_clock)),
    CaptureRow("driver", "gpu_versions", lambda facts: _texts([facts.nvml.driver])),
    CaptureRow("vbios", "gpu_versions", lambda facts: _texts(gpu.vbios for gpu in facts.nvml.gpus)),
    CaptureRow("ecc", "gpu_modes", _of_gpus(lambda gpu: gpu.modes.ecc)),
    CaptureRow("mig", "gpu_modes", _of_gpus(lambda gpu: gpu.modes.mig)),
    CaptureRow("persistence", "gpu_modes", _of_gpus(lambda gpu: gpu.modes.persistence)),
    CaptureRow("compute_mode", "gpu_modes", _compute),
    CaptureRow("fabric", "gpu_fabric", _of_gpus(_joined)),
    CaptureRow("nic_count", "ib_ports", _adapters),
    CaptureRow("nic_rate_gbs", "ib_ports", _rates),
    CaptureRow(
        "nic_firmware", "ib_ports", lambda facts: _texts(port.firmware for port in facts.ports)
    ),
    CaptureRow("nic_pcie_width", "nic_pcie_link", _nic_link("width")),
    CaptureRow("nic_pcie_generation", "nic_pcie_link", _nic_link("generation")),
    CaptureRow("interfaces", "interfaces", _interfaces),
    CaptureRow(
        "memory_bytes_min", "memory_size", lambda facts: int(facts.total_bytes * _MEMORY_SHARE)
    ),
    CaptureRow(
        "dimm_count",
        "dimms",
        lambda facts: sum(bool(slot.size_bytes) for slot in facts.slots) or None,
    ),
    CaptureRow(
        "dimm_bytes", "dimms", lambda facts: _least(slot.size_bytes or None for slot in facts.slots)
    ),
    CaptureRow("cpu_count", "cpu_count", lambda facts: facts.online),
    CaptureRow("cpu_governor", "cpu_governor", lambda facts: _texts(facts.governors)),
    CaptureRow("clock_source", "clock_source", lambda facts: _texts([facts.clock_source])),
    CaptureRow("swap", "swap", lambda facts: bool(facts.areas)),
    CaptureRow(
        "nvme_count",
        "nvme_smart",
        lambda facts: sum(drive.transport in {None, "pcie"} for drive in facts.drives) or None,
    ),
    CaptureRow(
        "services",
        "services",
        lambda facts: _texts(unit.name for unit in facts.units if unit.active in _RUNNING),
    ),
    CaptureRow("mounts", "mount_alive", _mounts),
    CaptureRow("kernel_modules", "kernel_modules", lambda facts: facts.present or None),
)


def objections(run: CheckRun, accepted: Collection[str]) -> list[Finding]:
    """Return the findings for which nothing may be captured, the worst first.

    Failures and what could not be judged in time; and warnings of checks that fill the profile,
    except those of the checks *accepted*: a port that is down only warns without a profile.
    """
    fill = {row.check for row in ROWS} | {"mount_state"}
    found = [
        item
        for item in run.findings
        if item.status in {Status.FAIL, Status.UNKNOWN}
        or (
            item.status is Status.WARN
            and item.unknown_reason is None
            and item.check in fill
            and item.check not in accepted
        )
    ]
    return sorted(found, key=lambda item: -item.status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """``text``: the file of the profile; "" if there are ``objections`` to the node.

    ``unused``: why no node would be judged by it, if it lay among the site's profiles.
    """

    text: str = ""
    unused: str | None = None
    objections: tuple[Finding, ...] = ()


def capture(plan: CheckPlan, path: Path, accepted: Collection[str], clock: Clock) -> Capture:
    """Return the profile of this node, to be written to *path*; reads the node twice.

    Raises:
        GpuopsError: The node does not pass the checks of its own profile.
    """
    recording, _ = record_facts(plan, clock)
    run = judge_recording(plan, recording)
    against = objections(run, accepted)
    if against:
        return Capture(objections=tuple(against))
    candidates = _with_profile(plan, CANDIDATES)
    suite = plan.suite.only(("services", "kernel_modules"))
    more, _ = record_facts(replace(candidates, suite=suite), clock)
    asked = judge_recording(replace(candidates, suite=suite), more).facts
    day = iso_utc(recording.moment.t_us)[:10]
    facts = _without_automounts({**run.facts, **asked}, plan.request.root)
    text = profile_text(facts, node=recording.node, day=day, root=plan.request.root)
    profile = parse_profile(path, tomllib.loads(text), plan.profiles)
    both = replace(recording, results={**recording.results, **more.results})
    again = judge_recording(_with_profile(plan, profile), replace(both, profile=profile.name))
    wrong = [item for item in again.findings if item.status is Status.FAIL]
    if wrong:
        raise GpuopsError(
            f"the node changed while it was captured, nothing is written: {wrong[0].check}: "
            f"{wrong[0].message}; try again"
        )
    return Capture(text=text, unused=_why_unused(plan, profile, facts.get("gpus")))


def _why_unused(plan: CheckPlan, profile: Profile, gpus: object) -> str | None:
    if not isinstance(gpus, Gpus):
        return None
    profiles = {**plan.profiles, profile.name: profile}
    chosen, problem = ProfileSelector(profiles=profiles, node=plan.request.node).select(gpus)
    return None if chosen is profile else problem


def _with_profile(plan: CheckPlan, profile: Profile) -> CheckPlan:
    return replace(
        plan,
        profiles={**plan.profiles, profile.name: profile},
        request=replace(plan.request, profile=profile.name),
    )


def _without_automounts(facts: Mapping[str, Any], root: Path) -> Mapping[str, Any]:
    """Return *facts* without mounts that autofs makes when they are used, and removes again."""
    automatic = [item.point for item in read_mounts(root) if item.filesystem == "autofs"]
    patterns = tuple(text for point in automatic for text in (point, f"{point}/*"))
    name = check_named("mount_alive").probe.name
    mounts = facts.get(name)
    if not isinstance(mounts, Filesystems):
        return facts
    kept = tuple(item for item in mounts.answers if not is_ignored(item.mount.point, patterns))
    return {**facts, name: replace(mounts, answers=kept)}


def profile_text(facts: Mapping[str, Any], *, node: str, day: str, root: Path = Path("/")) -> str:
    """Return the TOML of the profile that *facts* (by probe) give; *day* is a date."""
    gpus = facts.get("gpus")
    names, count = names_and_count(gpus) if isinstance(gpus, Gpus) else ((), 0)
    shipped = load_profiles([data_dir("checks") / "profiles"])
    base, _ = profile_for(shipped, node=node, gpu_names=names, gpu_count=count)
    models = Counter(names)
    shown = ", ".join(f"{number} x {name}" for name, number in models.items()) or "no GPU"
    lines = [f"about = {_quoted(f'captured on {node}, {day}: {shown}')}"]
    if base is not NO_PROFILE:
        lines.append(f"inherits = {_quoted(base.name)}")
    lines += [f"# {text}" for text in _versions(gpus, root)]
    lines.append("")
    for row in ROWS:
        fact = facts.get(check_named(row.check).probe.name)
        value = None if fact is None else row.value(fact)
        written = None if value is None else _written(row.key, value)
        if written is not None:
            source = _quoted(f"captured on {node}, {day} ({row.check})")
            lines.append(f"{row.key} = {{ value = {written}, source = {source} }}")
    lines += ["", "[match]"]
    if len(models) > 1:
        # A pattern of all models would match nodes with one of them, too.
        lines += [
            f"gpu_count = {count or len(names)}",
            f"nodes = [{_quoted(node)}]  # add those like it",
        ]
    elif names:
        pattern = re.sub(r"([][\\.^$*+?{}|()])", r"\\\1", names[0])
        lines += [f"gpu = {_quoted(pattern)}", f"gpu_count = {count or len(names)}"]
    else:
        lines.append(f"nodes = [{_quoted(node)}]")
    return "\n".join(lines) + "\n"


def _versions(gpus: object, root: Path) -> list[str]:
    """Return what no check compares, for people: the kernel, and NVML after its CUDA version."""
    try:
        kernel = (root / "proc/sys/kernel/osrelease").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        kernel = ""
    found = [f"kernel {kernel}"] if kernel.isprintable() and kernel else []
    if isinstance(gpus, Gpus) and gpus.nvml.nvml_version:
        cuda = gpus.nvml.nvml_version.partition(".")[0]
        found.append(f"CUDA {cuda} (NVML {gpus.nvml.nvml_version})")
    return [text for text in found if text.isprintable()]


def _written(key: str, value: Value) -> str | None:
    """Return *value* in TOML, None if it is beyond the plausible range of *key*."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        items = [_quoted(item) if isinstance(item, str) else _written(key, item) for item in value]
        return None if None in items else f"[{', '.join(map(str, items))}]"
    assert value is not None
    bounds = BOUNDS[key]
    number = int(value) if bounds.whole else round(float(value), 3)
    try:
        bounds.check(number)
    except ValueError:
        return None
    return repr(number)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
