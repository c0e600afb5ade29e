"""Why the system refuses to execute a program."""

import errno
import os

# The errors of execve(2) that another attempt would meet as well, and what the user can do.
REMEDIES = {
    errno.EACCES: "make it executable for this user, and not on a noexec mount",
    errno.ENOENT: "install it on this node, or correct its path",
    errno.ENOTDIR: "correct its path",
    errno.ENOEXEC: "install it for this machine, or give a script a first line such as #!/bin/sh",
}


def describe_refusal(program: str, error: OSError) -> str:
    """Return that *program* cannot be executed, why, and what the user can do, if anything."""
    why = error.strerror or str(error)
    remedy = REMEDIES.get(error.errno or 0, "")
    if error.errno == errno.ENOENT and os.path.exists(program):  # noqa: PTH110 the shim's imports
        why, remedy = "its interpreter does not exist", "correct its first line"
    return f"cannot execute {program}: {why}{remedy and f'; {remedy}'}"
