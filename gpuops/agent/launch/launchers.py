"""Other launchers behind ``gpuops run``: their settings become torchrun's flags.

accelerate and trl configure workers by variables (``ACCELERATE_*``, ``FSDP_*``), and call torch's
launcher; deepspeed starts workers itself, and passes ``--local_rank``; litgpt leaves them to
Lightning, which starts none under torchrun. What cannot be carried over is refused with what to
write instead.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpuops.agent.launch.captured import MARK
from gpuops.errors import UsageError
from gpuops.host.process.command import module_command, run_bounded

# torch's own macro, which its agent replaces in the arguments of each worker.
LOCAL_RANK = "--local_rank=${local_rank}"
_READ_S = 300.0  # importing what a launcher imports, from a slow file system
# accelerate's and torchrun's default; on one node the workers' port is any free one.
_PORT = 29500
_PER_JOB = frozenset({"MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE"})
_BY_NAME = {
    "accelerate": ("accelerate", "launch"),
    "accelerate-launch": ("accelerate",),
    "deepspeed": ("deepspeed",),
    "litgpt": ("litgpt",),
    "trl": ("trl",),
}
_BY_MODULE = {
    "accelerate.commands.launch": "accelerate-launch",
    "deepspeed.launcher.runner": "deepspeed",
}
_STARTS_ONE = (
    "{launcher} starts one process here, though {asked} are asked for (it starts several on "
    "processors by mpirun alone), so there is one rank; for {asked} put --nproc-per-node={asked} "
    "before {launcher}"
)
_WRITE = "write `gpuops run --nproc-per-node=N script.py …`"


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedOver:
    """What a launcher was asked for, in torchrun's words.

    ``flags`` by torchrun's names, with underscores; ``program``: the script, or ``-m`` and a
    module, and arguments; ``env``: what the launcher adds to the environment of its workers.
    """

    program: tuple[str, ...]
    flags: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def words(self, typed: Mapping[str, str | None]) -> list[str]:
        """Return torchrun's words; a flag that has a value in *typed* already is left out."""
        given = {k: v for k, v in self.flags.items() if typed.get(k) is None}
        flags = [
            f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}")
            for key, value in given.items()
        ]
        return [*flags, *self.program]


Read = Callable[[str, Sequence[str]], Mapping[str, Any]]


def launcher_of(script: str, *, is_module: bool) -> str | None:
    """Return the name of the launcher that *script* is, None where it is none known.

    A file of that name below the working directory is a script, as it always was.
    """
    if is_module:
        return _BY_MODULE.get(script)
    path = Path(script)
    is_script = path.is_file() and not path.is_absolute()
    return path.name if path.name in _BY_NAME and not is_script else None


def carry_over(
    name: str, args: Sequence[str], typed: Mapping[str, str | None], read: Read
) -> CarriedOver:
    """Return what the launcher *name* with *args* asks for; *read* runs it as `captured` does.

    *typed*: the flags of torchrun that stand in front of it.

    Raises:
        UsageError: It refuses its arguments, or asks for what torchrun's flags cannot say.
    """
    launcher, *more = _BY_NAME[name]
    if more and args[:1] != more:
        raise UsageError(f"of {name}, `{name} {more[0]}` starts a training; {_WRITE}")
    args = args[len(more) :]
    if launcher == "litgpt":
        return _of_litgpt(args, typed)
    found = read(launcher, args)
    if "error" in found:
        raise UsageError(f"`{launcher}` cannot be carried over: {found['error']}; {_WRITE}")
    if "deepspeed" in found:
        return _of_deepspeed(found["deepspeed"])
    env = {k: str(v) for k, v in found["env"].items() if k not in _PER_JOB}
    if "command" in found:
        carried = _of_command(launcher, found["command"], env)
        asked = int(found.get("asked", 1))
        if asked == 1 or typed.get("nproc_per_node") is not None:
            return carried
        return replace(carried, warnings=(_STARTS_ONE.format(launcher=launcher, asked=asked),))
    flags = dict(found["flags"])
    if "nnodes" not in flags and str(flags.get("master_port")) == str(_PORT):
        del flags["master_port"]
    return CarriedOver(program=tuple(found["program"]), flags=flags, env=env)


def reader(env: Mapping[str, str]) -> Read:
    """Return a function that asks the installed launcher itself, in a process with *env*."""

    def read(launcher: str, args: Sequence[str]) -> Mapping[str, Any]:
        command = module_command("gpuops.agent.launch.captured", launcher, *args)
        end = run_bounded(command, env, _READ_S, lambda: False)
        assert end is not None
        output = end.output.decode("utf-8", errors="replace")
        if MARK in output:
            found: dict[str, Any] = json.loads(output.rpartition(MARK)[2])
            return found
        if end.exit_code == 0:
            return {"error": "it printed its help, and starts nothing"}
        lines = end.errors.decode("utf-8", errors="replace").strip().splitlines()
        took = "it took too long" if end.exit_code is None else f"exit code {end.exit_code}"
        return {"error": lines[-1] if lines else took}

    return read


def _of_command(launcher: str, command: Sequence[str], env: Mapping[str, str]) -> CarriedOver:
    """Return what *command* is, which the launcher starts once, without torchrun."""
    flags = {"nproc_per_node": "1"}
    if command[0] == sys.executable:
        return CarriedOver(program=tuple(command[1:]), flags=flags, env=env)
    if Path(command[0]).name in {"mpirun", "mpiexec", "orterun", "deepspeed"}:
        raise UsageError(
            f"`{launcher}` would start the workers of several nodes by {command[0]}; write `srun "
            "--ntasks-per-node=1 gpuops run …`, or start `gpuops run` on each node with --nnodes, "
            "--node-rank and --rdzv-endpoint"
        )
    return CarriedOver(program=tuple(command), flags={**flags, "no_python": True}, env=env)


def _of_deepspeed(asked: Mapping[str, Any]) -> CarriedOver:
    hosts, include = asked["hostfile"], asked["include"]
    devices = include.removeprefix("localhost:")
    if asked["autotuning"] or asked["exclude"] or (include and devices == include):
        wanted = "autotuning" if asked["autotuning"] else "this choice of devices"
        raise UsageError(
            f"deepspeed's {wanted} has no counterpart: set CUDA_VISIBLE_DEVICES, and {_WRITE}"
        )
    if asked["num_nodes"] > 1 or asked["force_multi"] or Path(hosts).is_file():
        raise UsageError(
            f"deepspeed would reach other nodes by ssh ({hosts}); gpuops run is started on each "
            "node, by `srun --ntasks-per-node=1 gpuops run script.py …`, or with --nnodes, "
            "--node-rank and --rdzv-endpoint"
        )
    flags: dict[str, Any] = {"nproc_per_node": "gpu"}
    if asked["num_gpus"] > 0:
        flags["nproc_per_node"] = str(asked["num_gpus"])
    if include:
        flags["nproc_per_node"] = str(len(devices.split(",")))
    if asked["no_python"]:
        flags["no_python"] = True
    local_rank = [] if asked["no_local_rank"] else [LOCAL_RANK]
    left = [f"--{name}" for name in ("bind_cores_to_rank", "save_pid") if asked.get(name)]
    return CarriedOver(
        program=(
            *(["-m"] if asked["module"] else []),
            *(asked["user_script"], *local_rank, *asked["user_args"]),
        ),
        flags=flags,
        env={"CUDA_VISIBLE_DEVICES": devices} if include else {},
        warnings=(f"deepspeed's {', '.join(left)} is left out",) if left else (),
    )


def _of_litgpt(args: Sequence[str], typed: Mapping[str, str | None]) -> CarriedOver:
    devices, workers = _value(args, "devices"), typed.get("nproc_per_node")
    if devices is None and workers is None:
        raise UsageError(
            "how many workers litgpt wants is not on the command line (its default differs between "
            "commands); write `gpuops run litgpt … --devices N`, or --nproc-per-node=N before it "
            "where the number is in a file of litgpt"
        )
    if workers is not None and devices not in {None, "auto", workers}:
        raise UsageError(f"--nproc-per-node={workers}, but litgpt's --devices={devices}")
    n_nodes = _value(args, "num_nodes")
    flags = {"nproc_per_node": "gpu" if devices == "auto" else devices, "nnodes": n_nodes}
    return CarriedOver(
        program=("-m", "litgpt", *args), flags={k: v for k, v in flags.items() if v is not None}
    )


def _value(args: Sequence[str], name: str) -> str | None:
    """Return the last value of ``--name``, as ``--name V`` or ``--name=V``; None without one."""
    values = [b for a, b in pairwise(args) if a == f"--{name}"]
    values += [a.partition("=")[2] for a in args if a.startswith(f"--{name}=")]
    return values[-1] if values else None
