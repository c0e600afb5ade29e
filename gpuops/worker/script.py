"""Run the user's program as ``__main__``, indistinguishable from plain ``python``.

`runpy.run_path` restores the old ``__main__`` when the script ends, which breaks what runs later
(``atexit``, threads that outlive the script, pickling by name); so the module made here stays.

A worker dies with its agent: an orphan would continue training, and occupy its GPU, unsupervised.
"""

import ctypes
import io
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import FunctionType, ModuleType, TracebackType

_ZIP_MAGIC = b"PK\x03\x04"


def run_script(path: str, args: Sequence[str]) -> None:
    """Run the file *path* as ``python path args`` does; its exceptions are not caught."""
    sys.argv[:] = [path, *args]
    with io.open_code(path) as file:
        source = file.read()
    if path.endswith(".pyc") or source.startswith(_ZIP_MAGIC):
        runpy.run_path(path, run_name="__main__")
        return
    # Joined, not resolved: as Python itself does it.
    absolute = path if path.startswith("/") else f"{Path.cwd()}/{path}"
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path(path).resolve().parent))
    main = _fresh_main()
    main.__file__ = absolute
    main.__loader__ = SourceFileLoader("__main__", absolute)
    vars(main)["__cached__"] = None
    code = compile(source, absolute, "exec", dont_inherit=True)
    FunctionType(code, vars(main))()


def run_module(name: str, args: Sequence[str]) -> None:
    """Run the module *name* as ``python -m name args`` does."""
    sys.argv[:] = ["-m", *args]
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path.cwd()))
    _fresh_main()
    # The interpreter's own function for -m: only so do __spec__, argv[0] and messages agree.
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # noqa: SLF001


def _fresh_main() -> ModuleType:
    main = ModuleType("__main__")
    vars(main).update({"__builtins__": sys.modules["builtins"], "__annotations__": {}})
    sys.modules["__main__"] = main
    return main


def without_our_frames(
    traceback: TracebackType | None, files: frozenset[str]
) -> TracebackType | None:
    """Return *traceback* from the first frame that is not in one of *files*."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename in files:
        traceback = traceback.tb_next
    return traceback


def show_without_our_frames(files: frozenset[str]) -> None:
    """Trim the printed traceback of a fatal exception to the user's frames.

    The current hook stays in effect: the script may have set its own.
    """
    shown = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        trimmed = without_our_frames(traceback, files)
        shown(kind, error.with_traceback(trimmed), trimmed)

    sys.excepthook = hook


_PR_SET_PDEATHSIG = 1  # prctl(2); not named in Python's standard library


def die_with_parent(agent_pid: int | None) -> None:
    """Ask the kernel for SIGKILL at the parent's death; end now if the agent is dead already.

    The kernel ignores parents that died before the call (prctl(2)), hence the check afterwards.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if agent_pid is not None and os.getppid() != agent_pid and not _alive(agent_pid):
        os.kill(os.getpid(), signal.SIGKILL)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
