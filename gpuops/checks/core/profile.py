"""Hardware profiles: what a machine of one shape must have. Data, in ``checks/profiles/*.toml``.

A profile's name is its file's; a later folder (the site's own) replaces a shipped one by name.
Every expectation names its source. Reading and matching them is in
`gpuops.checks.core.profile_files`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberExpectation:
    """A number that must be met, in the unit that its key ends in."""

    value: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WordsExpectation:
    """Texts of which one must be met."""

    value: tuple[str, ...]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagExpectation:
    """On or off, as it must be."""

    value: bool
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileMatch:
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
    match: ProfileMatch = ProfileMatch()
    gpu_count: NumberExpectation | None = None
    nvlink_count: NumberExpectation | None = None
    pcie_generation: NumberExpectation | None = None
    pcie_width: NumberExpectation | None = None
    power_limit_w: NumberExpectation | None = None
    sm_clock_mhz_min: NumberExpectation | None = None
    driver: WordsExpectation | None = None
    vbios: WordsExpectation | None = None
    ecc: FlagExpectation | None = None
    mig: FlagExpectation | None = None
    persistence: FlagExpectation | None = None
    compute_mode: WordsExpectation | None = None
    fabric: FlagExpectation | None = None
    nic_count: NumberExpectation | None = None
    nic_rate_gbs: NumberExpectation | None = None
    nic_firmware: WordsExpectation | None = None
    memory_bytes_min: NumberExpectation | None = None
    dimm_count: NumberExpectation | None = None
    dimm_bytes: NumberExpectation | None = None
    cpu_count: NumberExpectation | None = None
    cpu_governor: WordsExpectation | None = None
    clock_source: WordsExpectation | None = None
    swap: FlagExpectation | None = None
    nvme_count: NumberExpectation | None = None
    services: WordsExpectation | None = None
    mounts: WordsExpectation | None = None
    kernel_modules: WordsExpectation | None = None


NO_PROFILE = Profile(name="none", about="no profile matches this node")
