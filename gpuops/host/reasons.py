"""Why a check that met an error of the operating system cannot be judged."""

import errno

from gpuops.model import UnknownReason


def reason_of(error: OSError) -> UnknownReason:
    """Return the reason for "unknown" that fits *error*."""
    if error.errno in {errno.EACCES, errno.EPERM}:
        return UnknownReason.NO_PERMISSION
    if error.errno == errno.ENOENT:
        return UnknownReason.MISSING_TOOL
    return UnknownReason.NOT_SUPPORTED
