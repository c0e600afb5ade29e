"""Start programs that outlive the command that starts them."""

import os
from collections.abc import Mapping, Sequence


def spawn_detached(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Start *argv* (an absolute path first) in its own session without our files; return its pid.

    Nothing waits for it. A caller that lives on leaves a zombie until it reaps that pid.

    Raises:
        OSError: It could not be started.
    """
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
        (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
    ]
    return os.posix_spawn(argv[0], list(argv), env, file_actions=actions, setsid=True)
