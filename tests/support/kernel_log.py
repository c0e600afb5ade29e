"""A kernel's log as checks see it: records, facts, and files of records."""

from gpuops.checks.core.check import ProbeContext
from gpuops.checks.core.kernel_rules import KMSG, gather
from gpuops.host.kmsg import KernelRecord
from gpuops.resources import data_dir
from gpuops.rules import load_rules

SECOND_US = 1_000_000
XID_DIRS = (data_dir("checks") / "xid",)
RULE_DIRS = (data_dir("checks") / "rules",)
RULES = load_rules(RULE_DIRS)


def records(*lines, start_us=0, step_us=SECOND_US):
    """Return *lines* as the kernel's records, *step_us* apart, numbered from 0."""
    return [KernelRecord(n, 4, start_us + n * step_us, line) for n, line in enumerate(lines)]


def facts(root, *lines, start_us=0, step_us=SECOND_US):
    """Return what the look makes of *lines*; *root* tells which GPUs there are."""
    machine = ProbeContext(root, xid_dirs=XID_DIRS)
    return gather(KMSG, records(*lines, start_us=start_us, step_us=step_us), RULES, machine)


def write_kmsg(root, lines):
    """Write ``(since_boot_us, text)`` of *lines* as a log of the kernel's own below *root*."""
    path = root / "dev/kmsg"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for number, (when_us, text) in enumerate(lines):
            file.write(f"4,{number},{when_us},-;{text}\n")


def gpu_information(root, address, uuid, minor=None):
    """Write what ``/proc/driver/nvidia`` tells of a GPU."""
    path = root / f"proc/driver/nvidia/gpus/{address}/information"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 18\nGPU UUID: \t {uuid}\n"
    path.write_text(text if minor is None else f"{text}Device Minor: \t {minor}\n")
