"""Hardware profiles: what a machine of one shape must have. Data, in ``checks/profiles/*.toml``.

A profile is named after its file; a later folder (the site's own) replaces a shipped profile of
that name. Every expectation names its source. `gpuops.checks.core.profile_files` reads and matches
profiles.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


# Without slots: calling a parametrised generic sets an attribute, which a frozen class with slots
# does not reject cleanly.
@dataclass(frozen=True, kw_only=True)
class Expectation(Generic[T]):
    """A value that must be met, and its source; a number is in the unit that its key ends in.

    ``is_shipped``: a profile of gpuops' own says it, not one that was made for this site's nodes.
    """

    value: T
    source: str
    is_shipped: bool = False


NumberExpectation = Expectation[float]
# One number for all, or one for each, in any order.
NumbersExpectation = Expectation[tuple[float, ...]]
FlagExpectation = Expectation[bool]
# One of these texts.
TextExpectation = Expectation[tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileMatch:
    """Which nodes a profile is for: all that is given must hold. An empty one matches no node.

    ``gpu`` is a regular expression of the whole NVML name; ``gpu_count`` counts NVIDIA GPUs on the
    PCI bus; ``nodes`` are patterns of node names (``gpu-a*``, ``gpu[001-128]``).
    """

    gpu: str | None = None
    gpu_count: int | None = None
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What is expected; None: nothing, and the check judges by what the device reports, or skips.

    ``services`` are systemd units that must be active; ``mounts`` are mount points that must be
    mounted; ``kernel_modules`` must be loaded; ``interfaces`` are network interfaces that must have
    a link; ``ib_pkeys`` are partition keys that InfiniBand ports must hold, as ``0x8001``; the name
    service must know ``users``. ``nic_rate_gbs`` is the rate of all adapters that count, or a list
    with one for each. ``path`` is the file that it was read from, and ``inherits`` the profile
    whose expectations it took over.
    """

    name: str
    about: str = ""
    path: str = ""
    inherits: str = ""
    match: ProfileMatch = ProfileMatch()
    gpu_count: NumberExpectation | None = None
    nvlink_count: NumberExpectation | None = None
    pcie_generation: NumberExpectation | None = None
    pcie_width: NumberExpectation | None = None
    power_limit_w: NumberExpectation | None = None
    sm_clock_mhz_min: NumberExpectation | None = None
    driver: TextExpectation | None = None
    vbios: TextExpectation | None = None
    ecc: FlagExpectation | None = None
    mig: FlagExpectation | None = None
    persistence: FlagExpectation | None = None
    compute_mode: TextExpectation | None = None
    fabric: FlagExpectation | None = None
    nic_count: NumberExpectation | None = None
    nic_rate_gbs: NumbersExpectation | None = None
    nic_firmware: TextExpectation | None = None
    ib_pkeys: TextExpectation | None = None
    nic_pcie_width: NumberExpectation | None = None
    nic_pcie_generation: NumberExpectation | None = None
    interfaces: TextExpectation | None = None
    memory_bytes_min: NumberExpectation | None = None
    dimm_count: NumberExpectation | None = None
    dimm_bytes: NumberExpectation | None = None
    cpu_count: NumberExpectation | None = None
    cpu_governor: TextExpectation | None = None
    clock_source: TextExpectation | None = None
    swap: FlagExpectation | None = None
    nvme_count: NumberExpectation | None = None
    services: TextExpectation | None = None
    mounts: TextExpectation | None = None
    kernel_modules: TextExpectation | None = None
    users: TextExpectation | None = None


NO_PROFILE = Profile(name="none", about="no profile matches this node")
