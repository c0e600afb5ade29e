"""A Python process that has torch imported and forks, for tests that start hundreds of them.

Importing torch takes 1.3 CPU-s and ending such an interpreter 0.4; a test of ``gpuops run`` starts
ten. `WarmPopen` is `subprocess.Popen`: where the command is a Python program of this interpreter, a
process that stands ready forks, and the fork becomes what the command would be, with its parent,
session, command line and environment (in /proc as well), descriptors, signals and exit code. An
agent that was started so starts its workers so. A kernel without CONFIG_CHECKPOINT_RESTORE cannot
show that command line: there every process is started anew.

As a program, ``warm_python.py FD``, it is the process that stands ready and listens on socket FD.
It has one thread and computes nothing. Each request has a connection of its own.
"""

import atexit
import ctypes
import faulthandler
import gc
import importlib
import inspect
import io
import json
import os
import pkgutil
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

import gpuops

# What the interpreter, the loader and the C library read when a process starts.
_READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "LC_", "LANG", "TZ", "KMP_", "MKL_")
_TELLS_CRASHES = "PYTHONFAULTHANDLER"  # a fork can still obey it
# Besides all of gpuops.
_IMPORTED = (
    "sqlalchemy.dialects.sqlite",
    "torch.distributed.run",
    "torch.nn.parallel",
    "torch.optim",
)
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LENGTH_BYTES = 8
_REPLY_S = 120  # of one that is still importing on a busy machine, too

# Numbers that Python has no names for: of prctl, clone, mount and umount2.
_PDEATHSIG, _SET_SUBREAPER, _GET_SUBREAPER, _SET_MM = 1, 36, 37, 35
_MM_MAP, _MM_MAP_SIZE = 14, 15
_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000
_MS_REC, _MS_SLAVE, _MNT_DETACH = 1 << 14, 1 << 19, 2
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option, *values):
    words = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    if _libc.prctl(option, *words) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


class WarmPython:
    """The process that stands ready, as those who ask it for a fork know it."""

    def __init__(self, address, env, process=None):
        self._address = address
        self._env = _read_at_start(env)
        self._process = process
        self._lock = threading.Lock()

    def end(self):
        """End it, in the process that started it."""
        self._process.kill()
        self._process.wait()

    def serves(self, words, env):
        """Say whether a fork would be what *words* start: its interpreter began as this one."""
        return _program(words) is not None and _read_at_start(env) == self._env

    def fork(self, words, env, cwd, streams, new_session):
        """Return the process id of a new child of this process that runs *words*."""
        ignored = {n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN}
        request = {
            "words": words,
            "env": env,
            "cwd": cwd,
            "new_session": new_session,
            "parent": os.getpid(),
            "ignored": sorted(ignored - {signal.SIGPIPE, signal.SIGXFSZ}),  # as Popen has it
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        }
        body = json.dumps(request).encode()
        with self._lock, socket.socket(socket.AF_UNIX) as connection, _subreaper():
            connection.settimeout(_REPLY_S)
            connection.connect(self._address)
            length = len(body).to_bytes(_LENGTH_BYTES, "big")
            socket.send_fds(connection, [length], streams)
            connection.sendall(body)
            return int.from_bytes(_read(connection, _LENGTH_BYTES), "big")


class _subreaper:  # noqa: N801 reads as a statement
    """Makes the grandchild that a server leaves behind a child of this process.

    So become orphans of other processes that end just then: they are reaped.
    """

    def __enter__(self):
        before = ctypes.c_int()
        _libc.prctl(_GET_SUBREAPER, ctypes.byref(before))
        self._before, self._began_s = before.value, time.time()
        self._children = {child.pid for child in psutil.Process().children()}
        _prctl(_SET_SUBREAPER, 1)

    def __exit__(self, *_):
        _prctl(_SET_SUBREAPER, self._before)
        for child in psutil.Process().children():
            if child.pid not in self._children and child.create_time() < self._began_s - 1:
                threading.Thread(target=_reap, args=[child.pid], daemon=True).start()


def _reap(pid):
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


class WarmPopen(subprocess.Popen):
    """`subprocess.Popen` whose process is a fork of `server` where that can be."""

    server = None

    def _execute_child(self, *given):
        asked = inspect.signature(subprocess.Popen._execute_child).bind(self, *given).arguments
        words = (
            list(map(os.fspath, asked["args"])) if isinstance(asked["args"], (list, tuple)) else []
        )
        env = dict(os.environ if asked["env"] is None else asked["env"])
        if not self._is_plain(asked) or self.server is None or not self.server.serves(words, env):
            super()._execute_child(*given)
            return
        pipes = [asked[n] for n in ("p2cread", "c2pwrite", "errwrite")]
        streams = [number if pipe == -1 else pipe for number, pipe in enumerate(pipes)]
        cwd = os.fspath(asked["cwd"] or Path.cwd())
        self.pid = self.server.fork(words, env, cwd, streams, asked["start_new_session"])
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in ends))

    @staticmethod
    def _is_plain(asked):
        unusual = ("executable", "preexec_fn", "pass_fds", "shell", "gid", "gids", "uid")
        usual = asked["close_fds"] and asked.get("process_group", -1) == -1
        return usual and not any(asked[name] for name in unusual)


def warm_popen(words, **options):
    """Return `WarmPopen`; the first call of a process starts the one that stands ready."""
    if WarmPopen.server is None and _can_show():
        env = {**_ENV, "OMP_NUM_THREADS": "1"}
        with _listener() as listener:
            fd = listener.fileno()
            command = [sys.executable, __file__, str(fd)]
            process = subprocess.Popen(command, env=env, pass_fds=[fd])
            WarmPopen.server = WarmPython(listener.getsockname(), env, process)
        atexit.register(WarmPopen.server.end)
    return WarmPopen(words, **options)


def warm_run(words, *, timeout, **options):
    """Return what `subprocess.run` would, with both streams captured as text."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with warm_popen(words, text=True, **streams, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, out, err)


_ENV = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def _can_show():
    """Say whether the kernel lets a process say what /proc shows of it: PR_SET_MM_MAP_SIZE."""
    size = ctypes.c_uint()
    words = (ctypes.c_ulong(_MM_MAP_SIZE), ctypes.byref(size), ctypes.c_ulong(0), ctypes.c_ulong(0))
    return _libc.prctl(_SET_MM, *words) == 0 and size.value == ctypes.sizeof(_MemoryMap)


def _listener():
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # the kernel finds an abstract address
    listener.listen(64)
    return listener


def _read_at_start(env):
    read = {name: value for name, value in env.items() if name.startswith(_READ_AT_START)}
    read.pop(_TELLS_CRASHES, None)
    return read


@dataclass
class _Program:
    """A Python program's command line, as far as a fork can be it."""

    argv: list
    module: str | None = None  # of -m
    namespace: str | None = None  # the network namespace that ``ip netns exec`` puts it in
    unbuffered: bool = False
    warning: str | None = None  # of -W


def _program(words):
    """Return the program that *words* start; None where only the interpreter itself can be it."""
    program, rest = _Program([]), list(words)
    if rest[:3] == ["ip", "netns", "exec"] and len(rest) > 4:
        program.namespace, rest = rest[3], rest[4:]
    if rest[:1] != [sys.executable]:
        return None
    rest = rest[1:]
    if rest[:1] == ["-u"]:
        program.unbuffered, rest = True, rest[1:]
    if rest[:1] == ["-W"] and len(rest) > 2:
        program.warning, rest = rest[1], rest[2:]
    if rest[:1] == ["-m"] and len(rest) > 1:
        program.module, program.argv = rest[1], rest[1:]
    elif rest and rest[0].endswith(".py") and Path(rest[0]).is_file():
        program.argv = rest
    return program if program.argv else None


def _read(connection, n_bytes):
    found = b""
    while len(found) < n_bytes:
        part = connection.recv(n_bytes - len(found))
        if not part:
            raise ConnectionError("the process that stands ready closed the connection")
        found += part
    return found


def _serve(listener):
    """Fork for each request, until the parent ends."""
    while True:
        connection, _ = listener.accept()
        try:
            length, streams, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, 3)
            request = json.loads(_read(connection, int.from_bytes(length, "big")))
        except (OSError, ValueError):
            connection.close()
            continue
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork() != 0:
                os._exit(0)
            _become(request, between, connection, streams, listener)
        os.waitpid(between, 0)
        connection.close()
        for fd in streams:
            os.close(fd)


def _become(request, between, connection, streams, listener):
    """Turn this process, a fork, into what the request asks for; never returns."""
    while os.getppid() == between:  # nothing tells a process that it has another parent
        time.sleep(0.0002)
    if request["new_session"]:
        os.setsid()
    else:
        with suppress(OSError):
            os.setpgid(0, os.getpgid(request["parent"]))
    if os.getppid() == request["parent"]:
        connection.sendall(os.getpid().to_bytes(_LENGTH_BYTES, "big"))
    connection.close()
    listener.close()
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    words, env = request["words"], request["env"]
    os.environ.clear()
    os.environ.update(env)
    _show(words, [f"{name}={value}" for name, value in env.items()])
    os.chdir(request["cwd"])
    for number in _ENDINGS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    program = _program(words)
    if program.namespace is not None:
        _enter(program.namespace)
    if program.warning is not None:
        warnings._processoptions([program.warning])
    _open_streams(program.unbuffered)
    sys.orig_argv[:] = words
    _tell_crashes(env)
    if program.module == "gpuops" and program.argv[1:2] == ["run"]:
        _warm_workers()
    _exit(_run(program.module, program.argv))


class _MemoryMap(ctypes.Structure):
    """``struct prctl_mm_map``: PR_SET_MM_MAP needs no privilege where it keeps the executable."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("code_start", "code_end", "data_start", "data_end")),
        *((name, ctypes.c_uint64) for name in ("brk_start", "brk", "stack_start")),
        *((name, ctypes.c_uint64) for name in ("arg_start", "arg_end", "env_start", "env_end")),
        ("auxv", ctypes.c_void_p),
        ("auxv_bytes", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


def _show(words, variables):
    """Have /proc show *words* as the command line and *variables* as the environment."""
    stat = list(map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[1:]))
    field = {number: stat[number - 4] for number in (26, 27, 28, 45, 46, 47)}  # as in proc(5)
    texts = [b"".join(os.fsencode(word) + b"\0" for word in part) for part in (words, variables)]
    _SHOWN.append(ctypes.create_string_buffer(b"".join(texts)))
    start = ctypes.addressof(_SHOWN[-1])
    middle, end = start + len(texts[0]), start + len(texts[0]) + len(texts[1])
    _libc.sbrk.restype = ctypes.c_uint64
    shown = _MemoryMap(
        *(field[26], field[27], field[45], field[46], field[47], _libc.sbrk(0), field[28]),
        *(start, middle, middle, end),
        *(None, 0, 0xFFFFFFFF),
    )
    _prctl(_SET_MM, _MM_MAP, ctypes.addressof(shown), ctypes.sizeof(shown))


_SHOWN = []  # for as long as the process


def _enter(namespace):
    """Enter a network namespace as ``ip netns exec`` does: /sys shows it as well."""
    with Path(f"/run/netns/{namespace}").open("rb") as file:
        if _libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    _libc.unshare(_CLONE_NEWNS)
    _libc.mount(b"", b"/", b"none", _MS_SLAVE | _MS_REC, None)
    _libc.umount2(b"/sys", _MNT_DETACH)
    if _libc.mount(namespace.encode(), b"/sys", b"sysfs", 0, None) != 0:
        raise OSError(ctypes.get_errno(), "mount /sys")


def _open_streams(unbuffered):
    for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        buffering = 0 if unbuffered and fd else -1
        raw = open(fd, mode + "b", buffering=buffering, closefd=False)  # noqa: SIM115 for good
        stream = io.TextIOWrapper(
            raw,
            encoding=getattr(sys, name).encoding,
            errors=getattr(sys, name).errors,
            line_buffering=raw.isatty() or (fd == 2 and not unbuffered),
            write_through=unbuffered and fd > 0,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _tell_crashes(env):
    """Have a fatal signal print the stacks of all threads, Python's and those of C++, if asked."""
    if not env.get(_TELLS_CRASHES):
        faulthandler.disable()
        return
    import torch

    faulthandler.enable(2)
    with suppress(AttributeError):  # not in every torch
        torch._C._set_print_stack_traces_on_fatal_signal(True)


def _warm_workers():
    """Have this process, an agent, start its workers as forks of a fork of it as it is now."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    listener = _listener()
    agent = os.getpid()
    if os.fork() == 0:
        _prctl(_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != agent:
            os._exit(0)
        for number in _ENDINGS:
            signal.signal(number, signal.SIG_IGN)
        for fd in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), fd)
        _show(["warm-python"], [])
        _serve(listener)
    WarmPopen.server = WarmPython(listener.getsockname(), os.environ)
    listener.close()
    subprocess_handler.Popen = WarmPopen


def _run(module, argv):
    """Run the program as the interpreter does; return its exit code."""
    sys.argv[:] = argv
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    main.__builtins__ = __builtins__
    sys.path.insert(0, str(Path.cwd() if module else Path(argv[0]).resolve().parent))
    try:
        if module:
            runpy._run_module_as_main(module)
        else:
            main.__file__ = argv[0]
            with io.open_code(argv[0]) as file:
                code = compile(file.read(), argv[0], "exec")
            exec(code, main.__dict__)
    except SystemExit as exc:
        if exc.code is None or isinstance(exc.code, int):
            return (exc.code or 0) & 0xFF
        print(exc.code, file=sys.stderr)
        return 1
    except BaseException as exc:  # noqa: BLE001 as the interpreter does
        trace = exc.__traceback__.tb_next  # without this frame
        sys.excepthook(type(exc), exc.with_traceback(trace), trace)
        if isinstance(exc, KeyboardInterrupt):
            _flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def _flush():
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _exit(code):
    threading._shutdown()
    atexit._run_exitfuncs()
    _flush()
    os._exit(code)


def _modules_of_gpuops():
    found = pkgutil.walk_packages(gpuops.__path__, "gpuops.")
    # Adapters import what not everybody has; the others are programs.
    return [m.name for m in found if not re.search(r"__main__|adapters|migrations|\.shim$", m.name)]


def main():
    """Import what tests use, and fork for whoever asks."""
    _prctl(_PDEATHSIG, signal.SIGKILL)
    listener = socket.socket(fileno=int(sys.argv[1]))
    sys.path.pop(0)
    for name in (*_IMPORTED, *_modules_of_gpuops()):
        importlib.import_module(name)
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()
    for number in _ENDINGS:
        signal.signal(number, signal.SIG_IGN)
    _serve(listener)


if __name__ == "__main__":
    main()
