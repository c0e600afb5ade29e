"""The command line of ``gpuops run``: torchrun's own parser plus a few flags of ours.

People type what they are used to, so these are the same: ``run script.py``, ``run torchrun
script.py``, ``run -- torchrun script.py``, ``run python -m torch.distributed.run script.py``.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from gpuops.agent.launch.launchers import CarriedOver, Read, carry_over, launcher_of, reader
from gpuops.agent.launch.plan import LaunchPlan
from gpuops.agent.launch.preconditions import check_program
from gpuops.config.schema import SettingValue
from gpuops.errors import UsageError
from gpuops.wire.worker_drill import WorkerDrill

DEFAULT = "default"
# Flags whose settings stand in another table than [run].
_KEYS = {
    "ckpt": "checkpoint.keeper",
    "ckpt_dir": "checkpoint.directory",
    "ckpt_domain": "checkpoint.domain",
    "ckpt_replicas": "checkpoint.replicas",
}


@dataclass(frozen=True, slots=True)
class Option:
    """The text of a value, None where there is none, and how the one who gave it knows it.

    ``is_general``: set in a file for all runs of a site, not for this one.
    """

    text: str | None
    shown: str
    is_set: bool
    is_general: bool = False

    @property
    def given(self) -> str:
        """Return the text of an option that has one."""
        assert self.text is not None
        return self.text


Options = Mapping[str, Option]


def read_option(
    name: str, found: argparse.Namespace, env: Mapping[str, str], values: Mapping[str, SettingValue]
) -> Option:
    """Return what was asked for *name*: by flag, by torchrun's ``PET_*``, by setting."""
    flag = f"--{name.replace('_', '-')}"
    typed = getattr(found, name, None)
    if typed is not None:
        return Option(str(typed), f"{flag}={typed}", is_set=True)
    variable = f"PET_{name.upper()}"
    if env.get(variable):
        return Option(env[variable], f"{flag}={env[variable]} ({variable})", is_set=True)
    key = _KEYS.get(name, f"run.{name}")
    value = values.get(key)
    if value is None or value.origin == DEFAULT:
        text = None if value is None else value.value
        return Option(text, f"{flag}={text}", is_set=False)
    origin = value.origin.removeprefix("environment ")
    is_general = not value.origin.startswith("environment ")
    shown = f"{key} = {value.value} ({origin})"
    return Option(value.value, shown, is_set=True, is_general=is_general)


_DESCRIPTION = "Run a training job as torchrun does; it recovers, and what broke is recorded."
_EPILOG = """\
`gpuops run status` shows a run while it lasts.
Exit codes: 0 done; 1 failed, the restarts are spent; 85 requeue me; 86 this node is unhealthy;
93 do not requeue, it would fail the same way again; 64 a wrong flag, or another job saves into the
directory of checkpoints.
Under `srun --ntasks-per-node=1` nodes, their order and where they meet are Slurm's, and one worker
is started for each GPU that Slurm gave. Every flag of the restart agent is a setting too (`gpuops
config show`), torchrun's are PET_* in the environment; what is typed wins.
"""
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_LAUNCHER_MODULES = frozenset({"torch.distributed.run"})
# Flags of torchrun whose absence means something here. torch's parser reads PET_* for them itself;
# without a default from there, what was given and where is known.
TORCH_OPTIONS = (
    *("nnodes", "nproc_per_node", "node_rank", "master_addr", "master_port"),
    *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"),
)
OUR_OPTIONS = (
    *("spares", "min_nodes", "node_unit", "max_restarts", "on_exhausted", "hang_timeout"),
    *("health_gate", "grow_after", "drain_grace", "http", "restart_exit_codes", "decide"),
    *("token_file", "insecure", "ckpt", "ckpt_dir", "ckpt_domain", "ckpt_replicas"),
    *("preflight", "record_steps", "slow_after"),
)


class HelpAskedError(Exception):
    """The user wants the help text, which is this exception's message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedOptions:
    """What stood on the command line, before environment, settings and Slurm are asked.

    ``env`` and ``warnings``: of another launcher; the environment is its workers'.
    """

    found: argparse.Namespace
    command: tuple[str, ...]
    store: str | None
    spool: str | None
    run_dir: str | None
    env: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What the user asked for. ``torch`` is the namespace that torch's own functions take.

    ``given`` has, by name, each flag of ours that somebody gave, as they gave it. ``warnings`` are
    lines for the user, printed once at the start.
    """

    torch: argparse.Namespace
    command: tuple[str, ...]
    run_name: str | None
    plan: LaunchPlan
    is_private: bool
    master: tuple[str, int] | None
    print_timeouts: bool = False
    as_json: bool = False
    drill: WorkerDrill | None = None
    given: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


_USAGE = "%(prog)s [flags of gpuops and torchrun] script.py [its arguments]"
# argparse's titles of the groups that torchrun's flags are in, and ours for them.
_TORCHS_GROUPS = {"positional arguments": "Program", "options": "Of torchrun, unchanged"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `gpuops run --help`)")

    def format_help(self) -> str:
        """Return the help with gpuops' own groups first, torchrun's flags behind."""
        head, *sections = re.split(r"^(?=\S.*:$)", super().format_help(), flags=re.MULTILINE)
        titled = {section.partition(":")[0]: section for section in sections}
        torchs = [
            f"{ours}:{titled.pop(title).partition(':')[2]}"
            for title, ours in _TORCHS_GROUPS.items()
            if title in titled
        ]
        parts = (head, *titled.values(), *torchs, _EPILOG)
        return "\n\n".join(part.strip() for part in parts) + "\n"


class _Help(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise HelpAskedError(parser.format_help())


def read_words(
    args: Sequence[str],
    env: Mapping[str, str],
    torch_parser: argparse.ArgumentParser,
    read: Read | None = None,
) -> TypedOptions:
    """Return what the words *args* say; *read* asks another launcher, see `carry_over`.

    Raises:
        UsageError: Whatever argparse refuses, in one line; no script; a script that cannot run.
        HelpAskedError: ``--help`` stood before the script.
    """
    parser = _parser(torch_parser, env)
    found, launchers = _unwrap(parser, list(args), read or reader(env))
    if found.tee is None and found.redirects is None:
        found.tee, found.redirects = "3", "0"
    found.tee, found.redirects = found.tee or "0", found.redirects or "0"
    check_program(found)
    return TypedOptions(
        found=found,
        command=tuple(args),
        store=found.store,
        spool=found.spool,
        run_dir=found.run_dir,
        env={name: value for each in launchers for name, value in each.env.items()},
        warnings=tuple(line for each in launchers for line in each.warnings),
    )


def help_text(torch_parser: argparse.ArgumentParser, env: Mapping[str, str]) -> str:
    """Return what ``gpuops run --help`` prints: our flags and torchrun's."""
    return _parser(torch_parser, env).format_help()


def _parser(torch_parser: argparse.ArgumentParser, env: Mapping[str, str]) -> _Parser:
    parser = _Parser(
        prog="gpuops run",
        usage=_USAGE,
        description=_DESCRIPTION,
        parents=[torch_parser],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        conflict_handler="resolve",
        add_help=False,
    )
    parser.add_argument("-h", "--help", action=_Help, nargs=0, help="Show this and exit.")
    _add_recovery(parser)
    _add_checkpoints(parser)
    _add_health(parser)
    _add_nodes(parser)
    _add_trust(parser)
    _add_records(parser)
    _add_drills(parser)
    _add_output(parser)
    # None marks what the user left out; torch 2.8 would say 29500 for the port.
    defaults: dict[str, Any] = dict.fromkeys(("tee", "redirects"))
    parser.set_defaults(
        **{key: value for key, value in defaults.items() if f"PET_{key.upper()}" not in env},
        **dict.fromkeys((*TORCH_OPTIONS, *OUR_OPTIONS)),
    )
    return parser


def _add_recovery(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Recovery", "These stand before the script, like all flags.")
    _both(
        group,
        "--max-restarts",
        metavar="N|N/WINDOW",
        help="Restarts before the run fails: 3 in all (the default), 10/6h: ten in any six hours.",
    )
    _both(
        group,
        "--restart-exit-codes",
        metavar="16,17",
        help="Exit codes with which the job asks for a restart: never a fault of its software.",
    )
    _both(
        group,
        "--decide",
        metavar="MODULE:FUNCTION",
        help="A function of yours that may overrule the restart decision.",
    )
    _both(
        group,
        "--drain-grace",
        metavar="S",
        help="Seconds from the scheduler's notice to its SIGKILL; default: what Slurm says.",
    )


def _add_checkpoints(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "Checkpoints", "For scripts with a gpuops.Checkpointer; others are not affected."
    )
    group.add_argument(
        "--ckpt",
        metavar="auto|off",
        help="Keep checkpoints in this node's memory, where they outlive the workers; default: "
        "auto.",
    )
    _both(
        group,
        "--ckpt-dir",
        metavar="DIR|URL",
        help="Where they persist; default: nowhere, unless the script names a directory.",
    )
    _both(
        group,
        "--ckpt-replicas",
        metavar="N",
        help="How many nodes have each state in memory, its own among them; default: 2.",
    )
    _both(
        group,
        "--ckpt-domain",
        metavar="PATH|FILE",
        help="What fails together with this node: row1/rack3, or a file that says it of all nodes "
        "(topology.conf, or labels); default: auto, the switches that Slurm reports.",
    )


def _add_health(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Health")
    _both(
        group,
        "--hang-timeout",
        metavar="auto|S|off",
        help="So long without a step is a hang; default: auto, learned from the job.",
    )
    _both(
        group,
        "--slow-after",
        metavar="S|off",
        help="A rank that is slower than its peers for so long is reported; default: 60 s.",
    )
    _both(
        group,
        "--health-gate",
        metavar="on|off",
        help="Check a node before it joins and after each failure; default: on.",
    )
    _both(
        group,
        "--preflight",
        metavar="off|quick|sweep",
        help="Before the first start test each node under load, too: its GPUs, or its processors "
        "(quick: 20 s), or the nodes in pairs, if the last sweep of one is older than the setting "
        "burnin.sweep_max_age (sweep: minutes); default: off.",
    )
    _both(
        group,
        "--http",
        metavar="ADDR:PORT|PORT|off",
        help="Where each agent answers /healthz, /state and /metrics; default: loopback, any port.",
    )


def _add_records(parser: argparse.ArgumentParser) -> None:
    _both(
        parser.add_argument_group("Slow ranks"),
        "--record-steps",
        action="store_const",
        const="on",
        help="Write each step of each rank into the run's folder, compressed, at most 64 MiB a "
        "run, for `gpuops detect replay`.",
    )


def _add_drills(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Drills")
    _both(
        group,
        "--allow-drills",
        action="store_true",
        help="Let workers inject into themselves the fault that GPUOPS_DRILL names, for example "
        "slow:rank=1,factor=1.5 (see `gpuops drill list`).",
    )


def _add_nodes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Nodes")
    _both(
        group,
        "--min-nodes",
        metavar="N",
        help="Go on with so many nodes; default: MIN of --nnodes=MIN:MAX, else all of them.",
    )
    _both(
        group, "--spares", metavar="N", help="Agents beyond those that train; they wait for a hole."
    )
    _both(group, "--node-unit", metavar="N", help="Only multiples of so many nodes train.")
    _both(
        group,
        "--on-exhausted",
        metavar="shrink|requeue",
        help="With too few nodes: train with fewer, or exit 85; default: shrink where fewer were "
        "allowed by a range or --min-nodes.",
    )
    _both(
        group,
        "--grow-after",
        metavar="S|never",
        help="How long a new node waits until the run restarts to take it in; default: 300.",
    )


def _add_trust(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Trust between nodes")
    _both(
        group,
        "--token-file",
        metavar="FILE",
        help="The token that all agents of the run have (or GPUOPS_TOKEN); default: one of yours "
        "that the first run makes, which works where nodes share your home directory.",
    )
    group.add_argument(
        "--insecure",
        action="store_const",
        const="on",
        help="Without a token, as open as torchrun: anyone who reaches the port can read and stop "
        "the run. Checkpoints in memory are not copied to other nodes.",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Output")
    group.add_argument("--run-name", metavar="NAME", help="Name in reports; default: the script's.")
    group.add_argument("--run-dir", metavar="DIR", help="Parent of the run's own folder.")
    group.add_argument("--store", metavar="URL", help="The incident store (GPUOPS_STORE).")
    group.add_argument("--spool", metavar="DIR", help="Where events wait for it (GPUOPS_SPOOL).")
    _both(
        group,
        "--print-timeouts",
        action="store_true",
        help="Print every time limit of this launch, checked, and exit.",
    )
    group.add_argument(
        "--json", action="store_true", dest="as_json", help="With it: as one JSON object."
    )


def _both(group: argparse._ArgumentGroup, flag: str, **kept: Any) -> None:  # noqa: ANN401
    """Add *flag* in both spellings, with dashes and with underscores, as torchrun has its own."""
    other = f"--{flag[2:].replace('-', '_')}"
    group.add_argument(flag, *[other] * (other != flag), **kept)


def _unwrap(
    parser: _Parser, args: list[str], read: Read
) -> tuple[argparse.Namespace, list[CarriedOver]]:
    """Parse, and parse again what stands behind a launcher's name; flags of both count.

    Of torchrun's flags the last one wins; those of other launchers give way to torchrun's.
    """
    found, launchers = argparse.Namespace(), list[CarriedOver]()
    while True:
        if args[:1] == ["--"]:
            args = args[1:]
        found = parser.parse_args(args, found)
        rest, script = list(found.training_script_args), str(found.training_script)
        launcher = launcher_of(script, is_module=bool(found.module))
        if launcher is not None and not found.no_python:
            typed = {name: getattr(found, name) for name in TORCH_OPTIONS}
            launchers.append(carry_over(launcher, rest, typed, read))
            found.module = False
            args = launchers[-1].words(typed)
        elif found.no_python or found.module:
            return found, launchers
        elif Path(script).name == "torchrun":
            args = rest
        elif _PYTHON.fullmatch(Path(script).name):
            args = _behind_python(rest)
        else:
            return found, launchers


def _behind_python(words: list[str]) -> list[str]:
    """Return torchrun's arguments for what was typed after ``python``."""
    while words[:1] == ["-u"]:  # workers are always unbuffered
        words = words[1:]
    if words[:1] == ["-m"] and words[1:2] and words[1] in _LAUNCHER_MODULES:
        return words[2:]
    if words[:1] == ["-m"] or (words and not words[0].startswith("-")):
        return words
    shown = " ".join(words[:1]) or "nothing"
    raise UsageError(f"after `python` a script or `-m module` is wanted, not {shown}")
