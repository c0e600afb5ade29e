"""Hardware profiles: what a machine of one shape must have. Data, in ``checks/profiles/*.toml``.

A profile's name is its file's; a later folder (the site's own) replaces a shipped one by name.
Every expectation names its source. Reading and matching them is in `gpuops.checks.profiles`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number that must be met, in the unit that its key ends in."""

    value: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Texts of which one must be met."""

    value: tuple[str, ...]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """On or off, as it must be."""

    value: bool
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """When a profile is a node's: all that is given must hold. Where nothing is, it is only named.

    ``gpu`` is a regular expression of the whole NVML name; ``gpu_count`` counts NVIDIA GPUs on the
    PCI bus; ``nodes`` are patterns of node names (``gpu-a*``, ``gpu[001-128]``).
    """

    gpu: str | None = None
    gpu_count: int | None = None
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What is expected; None: nothing is, and the check judges by the device's own word or skips.

    ``services`` are systemd units that must be active; ``mounts`` are mount points that must be
    there; ``kernel_modules`` must be loaded. ``path`` is the file that it was read from, and
    ``inherits`` the profile whose expectations it took over.
    """

    name: str
    about: str = ""
    path: str = ""
    inherits: str = ""
    match: Match = Match()
    gpu_count: Number | None = None
    nvlink_count: Number | None = None
    pcie_generation: Number | None = None
    pcie_width: Number | None = None
    power_limit_w: Number | None = None
    sm_clock_mhz_min: Number | None = None
    driver: Words | None = None
    vbios: Words | None = None
    ecc: Flag | None = None
    mig: Flag | None = None
    persistence: Flag | None = None
    compute_mode: Words | None = None
    fabric: Flag | None = None
    nic_count: Number | None = None
    nic_rate_gbs: Number | None = None
    nic_firmware: Words | None = None
    memory_bytes_min: Number | None = None
    dimm_count: Number | None = None
    dimm_bytes: Number | None = None
    cpu_count: Number | None = None
    cpu_governor: Words | None = None
    clock_source: Words | None = None
    swap: Flag | None = None
    nvme_count: Number | None = None
    services: Words | None = None
    mounts: Words | None = None
    kernel_modules: Words | None = None


NO_PROFILE = Profile(name="none", about="no profile matches this node")
