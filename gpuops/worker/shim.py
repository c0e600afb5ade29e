"""The program that ``gpuops run`` starts; it becomes the user's program in the same process.

``shim.py [--exec PROGRAM | -m MODULE | SCRIPT] args``: bind this process to its agent, prepare
evidence (stacks on SIGUSR2, the exception file, the heartbeat ring), then become the program.
Nothing here may stop the program: each part of the preparation may fail independently.
"""

import os
import sys

_HERE = os.path.realpath(__file__).rpartition("/")[0]
_ROOT = _HERE.removesuffix("/gpuops/worker")


def _open_imports() -> bool:
    """Make ``gpuops`` importable; return whether a path was added for it.

    Python put this file's directory first on `sys.path`. The package's root goes last, because a
    checkout may not be on the path.
    """
    if sys.path and os.path.realpath(sys.path[0]) == _HERE:
        del sys.path[0]
    elif __spec__ is not None and not sys.flags.safe_path:
        del sys.path[0]  # started with -m: the working directory
    if _ROOT in sys.path:
        return False
    sys.path.append(_ROOT)
    return True


_ADDED = _open_imports()

import contextlib  # noqa: E402 the path above comes first
import errno  # noqa: E402
import faulthandler  # noqa: E402
import io  # noqa: E402
import signal  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Mapping  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, NoReturn  # noqa: E402

from gpuops.config.resolve import environ  # noqa: E402
from gpuops.host.process.executable import describe_refusal  # noqa: E402
from gpuops.wire.ring import RingHeader, WorkerFlag, WorkerPhase, write_flags  # noqa: E402
from gpuops.worker import api, recorder, script  # noqa: E402
from gpuops.worker.failure import write_exception, write_torchelastic_error  # noqa: E402
from gpuops.worker.heartbeat import Heartbeat, create_ring  # noqa: E402
from gpuops.worker.optimizer_hook import install  # noqa: E402
from gpuops.worker.preemption import Preemption  # noqa: E402
from gpuops.worker.script import die_with_parent  # noqa: E402

if _ADDED:
    sys.path.remove(_ROOT)

_OUR_FILES = frozenset({__file__, script.__file__})


def main() -> None:
    """Become the program of the command line."""
    env = environ()
    argv = sys.argv[1:]
    if env.get("GPUOPS_DISABLE", "") in {"", "0", "false"}:
        prepare(env, becomes_another_program=argv[:1] == ["--exec"])
    if argv[:1] == ["--exec"]:
        become(argv[1:])
    try:
        if argv[:1] == ["-m"]:
            script.run_module(argv[1], argv[2:])
        else:
            script.run_script(argv[0], argv[1:])
        api.finish(WorkerPhase.FINISHED)
    except BaseException as error:  # boundary: recorded, and then ends the process as without us
        is_end = isinstance(error, SystemExit) and error.code in {None, 0}
        api.finish(WorkerPhase.FINISHED if is_end else WorkerPhase.RAISED)
        if isinstance(error, Exception):
            with contextlib.suppress(Exception):
                note(error, env)
        script.show_without_our_frames(_OUR_FILES)
        raise


def become(argv: list[str]) -> NoReturn:
    """Become the program *argv*; where that fails, print why and exit as a shell would."""
    try:
        os.execvp(argv[0], argv)  # noqa: S606 the user's own program
    except OSError as error:
        sys.stderr.write(f"{describe_refusal(argv[0], error)}\n")
        sys.exit(127 if error.errno == errno.ENOENT else 126)


def prepare(env: Mapping[str, str], *, becomes_another_program: bool) -> None:
    """Bind this process to its agent and prepare its evidence."""
    agent_pid = env.get("GPUOPS_AGENT_PID", "")
    with contextlib.suppress(Exception):
        die_with_parent(int(agent_pid) if agent_pid.isdecimal() else None)
    if becomes_another_program:
        return
    preemption = Preemption()
    with contextlib.suppress(Exception):
        faulthandler.enable(all_threads=True)
        preemption.dumps_stacks = dump_stacks_to(env.get("GPUOPS_STACKS", ""))
    with contextlib.suppress(Exception):
        write_whole_lines()
    with contextlib.suppress(Exception):
        start_heartbeat(env, preemption)
    with contextlib.suppress(Exception):
        recorder.install(env)
    with contextlib.suppress(Exception):
        map_state_ahead(env)


def map_state_ahead(env: Mapping[str, str]) -> None:
    """Map what this worker will load, in a thread, if the keeper has a state.

    Raises:
        KeyError, ValueError: *env* does not say which rank this is.
    """
    if env.get("GPUOPS_HAS_STATE"):
        # Its 60 modules are imported here, because a thread that imports may deadlock a fork.
        from gpuops.worker import map_ahead

        keeper = Path(env["GPUOPS_KEEPER"])
        map_ahead.start(keeper, rank=int(env["RANK"]), world=int(env["WORLD_SIZE"]))


def dump_stacks_to(path: str) -> bool:
    """Have SIGUSR2 append the stacks of all threads to *path*; return whether that works.

    Without a path, or where it cannot be opened, they go to standard error.
    """
    file = None
    if path:
        with contextlib.suppress(OSError):
            # Open for as long as the process lives: a signal handler cannot open it.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            file = os.open(path, flags, 0o600)
    faulthandler.register(signal.SIGUSR2, sys.stderr if file is None else file, all_threads=True)
    return file is not None


def write_whole_lines() -> None:
    """Write each printed line at once: consoles of several ranks interleave separate writes.

    ``python -u`` writes a line and its end separately.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def start_heartbeat(env: Mapping[str, str], preemption: Preemption) -> None:
    """Create the ring that the agent named and hook it to later optimizers.

    Only with a ring do we handle signals: without it the agent would not see them.

    Raises:
        OSError, KeyError, ValueError: No ring is named, or it cannot be made.
    """
    header = RingHeader(
        rank=int(env["RANK"]),
        generation=int(env["GPUOPS_GENERATION"]),
        pid=os.getpid(),
        start_mono_ns=time.monotonic_ns(),
    )
    ring = create_ring(Path(env["GPUOPS_RING"]), header)
    view = memoryview(ring)
    # Before the first beat, for a worker that hangs early.
    write_flags(view, preemption.ours() & WorkerFlag.HANDLES_SIGUSR2, WorkerFlag.HANDLES_SIGUSR2)
    preemption.heart = heart = Heartbeat(view, handlers=preemption.ours)
    api.connect(heart, lambda: preemption.signalled_ns)
    os.register_at_fork(after_in_child=heart.stop)
    on_hidden = say_hidden if header.rank == 0 else lambda: None
    install(with_drill(heart, env), heart.begin_step, heart.loader, on_hidden)
    preemption.install()


def with_drill(heart: Heartbeat, env: Mapping[str, str]) -> Callable[[Any, object, object], None]:
    """Return the hook of *heart*, followed by the fault that this worker is to inject, if any."""
    if not env.get("GPUOPS_DRILL"):
        return heart
    from gpuops.worker.drills import drill_of  # most workers do without it

    drill = drill_of(env)
    if drill is None:
        return heart

    def beat_and_fail(optimizer: Any, args: object, kwargs: object) -> None:  # noqa: ANN401
        heart(optimizer, args, kwargs)
        drill()

    return beat_and_fail


def say_hidden() -> None:
    """Say what a step that is compiled as one graph keeps from the agent."""
    sys.stderr.write(
        "gpuops: optimizer.step is compiled with fullgraph=True: its steps are not seen and hangs "
        "are not detected; call gpuops.progress(step) after each step\n"
    )


def note(error: Exception, env: Mapping[str, str]) -> None:
    """Write the error files of *error* for the agent and torch, without our own frames.

    Raises:
        OSError: The directory is gone or full.
    """
    mono_ns, now_us = time.monotonic_ns(), time.time_ns() // 1000
    trimmed = error.with_traceback(script.without_our_frames(error.__traceback__, _OUR_FILES))
    if env.get("GPUOPS_ERROR_FILE"):
        path = Path(env["GPUOPS_ERROR_FILE"])
        write_exception(trimmed, path, now_us=now_us, mono_ns=mono_ns)
    if env.get("TORCHELASTIC_ERROR_FILE"):
        write_torchelastic_error(trimmed, Path(env["TORCHELASTIC_ERROR_FILE"]))


if __name__ == "__main__":
    main()
