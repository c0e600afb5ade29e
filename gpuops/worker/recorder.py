"""Lets the agent read torch's flight recorder while this process lives, also while it hangs.

torch's own worker server answers from a thread in C++, on a socket that the agent named: it needs
neither the main thread nor the interpreter's lock. The recorder of gloo does not know who is in a
group, so that is noted in a file. Private names of torch, seen in 2.13: where one is missing,
nothing is lost but this.
"""

import atexit
import contextlib
import ctypes
import functools
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from gpuops.host.thread_limit import room_for_threads
from gpuops.worker.optimizer_hook import when_imported

MODULE = "torch.distributed.distributed_c10d"
GROUPS_BYTES_MAX = 4 * 2**20
_ERROR = 2  # c10's log levels: INFO, WARNING, ERROR
# Where a thread cannot be started the server ends the process; and the program needs threads too.
_ROOM_SHARE = 0.5


def install(env: Mapping[str, str]) -> None:
    """Prepare the recorder's socket and the file of groups once torch.distributed is imported."""
    socket, groups = env.get("GPUOPS_RECORDER"), env.get("GPUOPS_GROUPS")
    if socket and groups:
        n_ranks = int(env.get("LOCAL_WORLD_SIZE", "1"))
        when_imported(MODULE, lambda module: _prepare(module, Path(socket), Path(groups), n_ranks))


def _prepare(module: ModuleType, socket: Path, groups: Path, n_ranks: int) -> None:
    # boundary: whatever fails here, the program trains, and the other part may work.
    with contextlib.suppress(Exception):
        _note_groups(module, groups)
    with contextlib.suppress(Exception):
        if n_ranks * _threads() <= room_for_threads() * _ROOM_SHARE:
            _serve(socket)


def _threads() -> int:
    """Return how many threads a server has: cpp-httplib's CPPHTTPLIB_THREAD_POOL_COUNT, and one."""
    return max(8, (os.cpu_count() or 1) - 1) + 1


def _serve(path: Path) -> None:
    """Start torch's worker server at *path*.

    Raises:
        AttributeError: This torch has none.
        RuntimeError: There is something at *path*, or it cannot be made.
    """
    torch, c10d = sys.modules["torch"], sys.modules["torch._C._distributed_c10d"]
    with _without_warnings(Path(str(torch.__file__)).parent / "lib" / "libc10.so"):
        server = c10d._WorkerServer(str(path))  # noqa: SLF001 see the module's docstring
    # Its destructor would wait for its threads, which a forked child does not have, and would end
    # the server of the parent: it must never run.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
    atexit.register(_remove, path, os.getpid())


def _remove(path: Path, pid: int) -> None:
    """Let nobody ask a process that ends: its C++ objects are destroyed under the server."""
    if os.getpid() == pid:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _without_warnings(library: Path) -> Iterator[None]:
    """Keep c10 from warning that a server listens; it does so on the rank's standard error."""
    try:
        level = ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        yield
        return
    before, level.value = level.value, max(level.value, _ERROR)
    try:
        yield
    finally:
        level.value = before


def _note_groups(module: Any, path: Path) -> None:  # noqa: ANN401 torch is not imported here
    """Have each group that *module* makes with this rank in it appended to *path*, a JSON line."""
    make, pid = module._new_process_group_helper, os.getpid()  # noqa: SLF001 as above

    @functools.wraps(make)
    def make_and_note(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 as torch has it
        made = make(*args, **kwargs)
        with contextlib.suppress(Exception):  # boundary: as above
            if os.getpid() == pid:
                ranks = args[2] if len(args) > 2 else kwargs["global_ranks_in_group"]
                _note(made[0], ranks, path)
        return made

    module._new_process_group_helper = make_and_note  # noqa: SLF001 as above


def _note(group: Any, ranks: list[int], path: Path) -> None:  # noqa: ANN401 as above
    """Append *group*; none of its *ranks* is named where it is of all."""
    name = getattr(group, "group_name", None)
    if name is None:  # torch's mark for a group without this rank
        return
    line = json.dumps({"group": name, "ranks": list(ranks or range(group.size()))}) + "\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.open(path, flags, 0o600)
    try:
        if os.fstat(file).st_size + len(line) <= GROUPS_BYTES_MAX:
            os.write(file, line.encode())
    finally:
        os.close(file)
