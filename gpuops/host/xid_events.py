"""Watch for Xids and tell of each on standard output: ``python -m gpuops.host.xid_events SOURCE``.

A process of its own, one for each source: NVML can hang, or crash whoever asks it, just when a GPU
is sick, and the kernel's log must be heard then. It ends when its standard input does. The lines
are those of `gpuops.host.xid_watch`.
"""

import sys
from pathlib import Path

from gpuops.errors import EXIT_FAIL, EXIT_OK, EXIT_UNKNOWN, EXIT_USAGE, ProbeError
from gpuops.host.clock import SystemClock
from gpuops.host.process.die_with_parent import die_with_parent
from gpuops.host.xid_watch import XidReporter, XidSource, XidSourceEnded
from gpuops.model import UnknownReason

_WHY = {
    UnknownReason.MISSING_TOOL.value: XidSourceEnded.ABSENT,
    UnknownReason.NOT_SUPPORTED.value: XidSourceEnded.ABSENT,
    UnknownReason.NO_PERMISSION.value: XidSourceEnded.NO_PERMISSION,
}


def main(arguments: list[str]) -> int:
    """Watch until the parent ends; return 3 where there is nothing to watch, 1 after an error."""
    if not 1 <= len(arguments) <= 2 or arguments[0] not in set(XidSource):
        sys.stderr.write("python -m gpuops.host.xid_events nvml|kernel [ROOT]\n")
        return EXIT_USAGE
    source, root = XidSource(arguments[0]), Path(*arguments[1:] or ["/"])
    die_with_parent()
    teller = XidReporter(_write, SystemClock())
    try:
        _watch(source, root, teller)
    except ProbeError as exc:
        why = _WHY.get(exc.reason, XidSourceEnded.ERROR)
        teller.over(why, str(exc))
        return EXIT_FAIL if why is XidSourceEnded.ERROR else EXIT_UNKNOWN
    return EXIT_OK


def _watch(source: XidSource, root: Path, teller: XidReporter) -> None:
    if source is XidSource.KERNEL:
        from gpuops.host.xid_kernel import XidLog

        XidLog(root, teller, SystemClock()).run()
    else:
        import pynvml

        from gpuops.host.xid_nvml import XidWatch

        XidWatch(pynvml, teller, SystemClock()).run()


def _write(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
