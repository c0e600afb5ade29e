"""The settings of ``gpuops run``: the tables ``[run]`` and ``[checkpoint]``, its flags as well.

A setting's value is the text that was written, once it has been found good; the functions below say
what a text means. They raise ValueError that says what is wanted.
"""

import ipaddress
import re
from collections.abc import Callable
from pathlib import Path

from gpuops.config_values import Setting
from gpuops.units import parse_seconds

NODES_MAX = 65_536
RESTARTS_MAX = 1_000_000
# With a window: the time of each is kept, in a record that every agent reads at each change.
WINDOW_RESTARTS_MAX = 1000
LONGEST_S = 30 * 86_400.0
RESTARTS_DEFAULT = "3"
GROW_AFTER_DEFAULT = "300"
LOOPBACK = "127.0.0.1"
REPLICAS_MAX = 16
DOMAIN_LEVELS_MAX = 16
LEASE_DEFAULT = "120"
LAST_SAVE_DEFAULT = "10m"
_DOMAIN_NAME = re.compile(r"[^\s/]{1,200}")
WINDOW_S_MIN = 60.0
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


def restarts(text: str) -> tuple[int, float | None]:
    """Return the budget in ``10`` or ``10/6h``: restarts, and the window in seconds if any."""
    number, slash, window = text.partition("/")
    if not number.strip().isdecimal() or int(number) > RESTARTS_MAX:
        raise ValueError("a number of restarts is wanted, or one in a time as in 10/6h")
    window_s = _seconds(window) if slash else None
    if window_s is not None and window_s < WINDOW_S_MIN:
        raise ValueError(f"no two restarts fall into {window_s:g} s; a time as in 10/6h is wanted")
    if window_s is not None and int(number) > WINDOW_RESTARTS_MAX:
        raise ValueError(f"at most {WINDOW_RESTARTS_MAX} restarts in a time are wanted")
    return int(number), window_s


def nodes(text: str) -> int:
    """Return a number of nodes, 1 at least."""
    if not text.isdecimal() or not 1 <= int(text) <= NODES_MAX:
        raise ValueError("a number of nodes is wanted, 1 at least")
    return int(text)


def spares(text: str) -> int:
    """Return a number of nodes, which may be 0."""
    return 0 if text.isdecimal() and int(text) == 0 else nodes(text)


def on_exhausted(text: str) -> str:
    """Return ``shrink`` or ``requeue``."""
    if text not in ("shrink", "requeue"):
        raise ValueError("shrink or requeue is wanted")
    return text


def hang_timeout(text: str) -> float | None:
    """Return the seconds without a step that are a hang; None: learned; 0: never."""
    if text == "auto":
        return None
    return 0.0 if text == "off" else _seconds(text, ", auto or off")


def switch(text: str) -> bool:
    """Return whether *text* is ``on``."""
    words = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}
    if text.lower() not in words:
        raise ValueError("on or off is wanted")
    return words[text.lower()]


def grow_after(text: str) -> float | None:
    """Return the seconds after which a run may take more nodes in; None: never."""
    return None if text == "never" else _seconds(text, " or never")


def drain_grace(text: str) -> float:
    """Return the seconds between the scheduler's notice and its SIGKILL."""
    return _seconds(text)


def replicas(text: str) -> int:
    """Return how many nodes are to have each checkpoint, from 1 to `REPLICAS_MAX`."""
    if not text.isdecimal() or not 1 <= int(text) <= REPLICAS_MAX:
        raise ValueError(f"a number from 1 to {REPLICAS_MAX} is wanted")
    return int(text)


def http(text: str) -> tuple[str, int | None]:
    """Return the address and port to listen on, 0 for any free one; a port of None: none at all."""
    if text == "off":
        return LOOPBACK, None
    address, colon, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65_535:
        raise ValueError("ADDRESS:PORT, PORT or off is wanted")
    if not colon:
        return LOOPBACK, int(port)
    address = address.removeprefix("[").removesuffix("]")
    try:
        return str(ipaddress.ip_address(address)), int(port)
    except ValueError:
        raise ValueError(f"{address!r} is not an IP address; ADDRESS:PORT is wanted") from None


def exit_codes(text: str) -> frozenset[int]:
    """Return the exit codes in ``16,17``; none in an empty text."""
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if not all(word.isdecimal() and 0 < int(word) < 256 for word in words):
        raise ValueError("exit codes from 1 to 255 are wanted, as in 16,17")
    return frozenset(map(int, words))


def decide(text: str) -> str:
    """Return *text* where it names a function, as in ``site.policy:decide``."""
    if _FUNCTION.fullmatch(text) is None:
        raise ValueError("the name of a function is wanted, as in site_policy:decide")
    return text


def file(text: str) -> str:
    """Return *text*, an absolute path."""
    if not Path(text).expanduser().is_absolute():
        raise ValueError("an absolute path is wanted")
    return text


def checkpoints(text: str) -> bool:
    """Return whether checkpoints are kept in memory at all: ``auto`` or ``off``."""
    if text not in ("auto", "off"):
        raise ValueError("auto or off is wanted")
    return text == "auto"


def directory(text: str) -> str:
    """Return *text*, a directory or the URL of one; its ``~`` is not expanded yet."""
    if not text.strip() or "\0" in text:
        raise ValueError("a directory, or a URL such as s3://bucket/name, is wanted")
    return text


def domain(text: str) -> str:
    """Return *text*: ``auto``, ``off``, a path of names like row1/rack3, or an absolute file."""
    names = text.split("/")
    is_path = len(names) <= DOMAIN_LEVELS_MAX and all(map(_DOMAIN_NAME.fullmatch, names))
    if not is_path and not (is_domain_file(text) and "\0" not in text):
        raise ValueError("auto, off, a path like row1/rack3, or an absolute file is wanted")
    return text


def is_domain_file(text: str) -> bool:
    """Say whether *text* names a file of failure domains, not a domain."""
    return text.startswith(("/", "~"))


def lasting(text: str) -> float:
    """Return a time in seconds."""
    return _seconds(text)


def _seconds(text: str, more: str = "") -> float:
    try:
        seconds = parse_seconds(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= LONGEST_S:
        raise ValueError(
            f"a time as in 90, 90s or 2h{more} is wanted, up to {LONGEST_S / 86400:g} days"
        )
    return seconds


def _checked(read: Callable[[str], object]) -> Callable[[object], str]:
    """Return a reader of what TOML may hold: it gives the text, which *read* has understood."""

    def parse(value: object) -> str:
        text = _as_text(value)
        read(text)
        return text

    return parse


def _as_text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if not isinstance(value, str):
        raise ValueError("text or a number is wanted")  # noqa: TRY004 as every reader's refusal
    return value


def _setting(name: str, read: Callable[[str], object], default: str | None, help: str) -> Setting:  # noqa: A002 the field's name
    return Setting(
        f"run.{name}",
        f"GPUOPS_{name.upper()}",
        _checked(read),
        lambda _env, _root: default,
        help,
    )


def _of_checkpoints(
    name: str,
    env: str,
    read: Callable[[str], object],
    default: str | None,
    help: str,  # noqa: A002 the field's name
) -> Setting:
    return Setting(f"checkpoint.{name}", env, _checked(read), lambda _env, _root: default, help)


RUN_SETTINGS = (
    _setting("spares", spares, "0", "agents beyond those that train, which wait for a hole"),
    _setting("min_nodes", nodes, None, "nodes that will do; unset: MIN of --nnodes=MIN:MAX"),
    _setting("node_unit", nodes, "1", "only multiples of so many nodes train"),
    _setting(
        "max_restarts",
        restarts,
        RESTARTS_DEFAULT,
        "restarts before the run fails: 3 in all, 10/6h: ten in any six hours",
    ),
    _setting(
        "on_exhausted",
        on_exhausted,
        None,
        "with too few nodes: shrink, or requeue (exit 85); unset: shrink where fewer were allowed",
    ),
    _setting(
        "hang_timeout",
        hang_timeout,
        "auto",
        "so long without a step is a hang: auto (learned from the job), seconds, off",
    ),
    _setting("health_gate", switch, "on", "check a node before it joins and after each failure"),
    _setting(
        "grow_after",
        grow_after,
        GROW_AFTER_DEFAULT,
        "how long a new node waits before the run restarts to take it in, or never",
    ),
    _setting(
        "drain_grace",
        drain_grace,
        None,
        "seconds from the scheduler's notice to its SIGKILL; unset: what Slurm says",
    ),
    _setting("http", http, "0", "where an agent answers: PORT on loopback, ADDRESS:PORT, or off"),
    _setting(
        "restart_exit_codes",
        exit_codes,
        "",
        "exit codes with which the job asks for a restart, as in 16,17",
    ),
    _setting("decide", decide, None, "a function of yours that may overrule the restart decision"),
    _setting(
        "token_file",
        file,
        None,
        "a file with the token that agents of one run prove (or GPUOPS_TOKEN)",
    ),
    _setting(
        "exit_code_file",
        file,
        None,
        "a file, there already, that gets the run's exit code: srun's is that of a killed task",
    ),
)

CHECKPOINT_SETTINGS = (
    _of_checkpoints(
        "keeper",
        "GPUOPS_CKPT",
        checkpoints,
        "auto",
        "auto: gpuops run keeps a process that holds checkpoints in memory; off: it does not",
    ),
    _of_checkpoints(
        "directory",
        "GPUOPS_CKPT_DIR",
        directory,
        None,
        "where checkpoints persist: a directory or a URL; unset: nowhere, unless the script says",
    ),
    _of_checkpoints(
        "lease",
        "GPUOPS_CKPT_LEASE",
        lasting,
        LEASE_DEFAULT,
        "how long checkpoints in memory wait for the agent to come back after it was killed",
    ),
    _of_checkpoints(
        "replicas",
        "GPUOPS_CKPT_REPLICAS",
        replicas,
        "2",
        "how many nodes of a run have each checkpoint in memory, the one that saved it among them",
    ),
    _of_checkpoints(
        "domain",
        "GPUOPS_CKPT_DOMAIN",
        domain,
        "auto",
        "what fails together with a node, so that copies lie elsewhere: auto (the switches that "
        "Slurm tells of), off, a path like row1/rack3, or a file (topology.conf, or labels)",
    ),
    _of_checkpoints(
        "last_save",
        "GPUOPS_CKPT_LAST_SAVE",
        lasting,
        LAST_SAVE_DEFAULT,
        "at most so long the end of a run waits until its newest checkpoint has persisted",
    ),
)
