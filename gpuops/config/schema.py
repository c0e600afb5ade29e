"""The settings of ``gpuops run``: the tables ``[run]`` and ``[checkpoint]``, its flags as well.

A setting's value is the validated text; the parsers convert it and raise a ValueError that names
what they expect.
"""

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuops.units import parse_bytes, parse_seconds


@dataclass(frozen=True, slots=True)
class Setting:
    """One key: how to read it and what it means."""

    key: str
    env: str
    parse: Callable[[object], Any]
    default: Callable[[Mapping[str, str], bool], Any]
    help: str


@dataclass(frozen=True, slots=True)
class SettingValue:
    """A setting's value and its origin."""

    value: Any
    origin: str


def to_text(value: object) -> str:
    """Return *value*, text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError("expected a non-empty string")
    return value


def to_path(value: object) -> Path:
    """Return the path in *value*, its ``~`` expanded."""
    return Path(to_text(value)).expanduser()


def to_size(value: object) -> int:
    """Return the bytes in *value*, as in ``256MiB``."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    size = parse_bytes(to_text(value))
    if size <= 0:
        raise ValueError("expected a size above zero")
    return size


def to_count(value: object) -> int | None:
    """Return *value*, a number from 0 to 1024."""
    return _whole(value, 0, 1024, "a number from 0 to 1024")


def _whole(value: object, first: int, last: int, expected: str) -> int:
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not first <= value <= last:
        raise ValueError(f"expected {expected}")
    return value


DAYS_MAX = 36_500


def to_days(value: object) -> int:
    """Return *value*, a number of days; 0: for ever."""
    return _whole(value, 0, DAYS_MAX, f"a number of days from 0 (for ever) to {DAYS_MAX}")


def to_bool(value: object) -> bool:
    """Return the boolean in *value*: 1, 0, true, false."""
    words = {"1": True, "true": True, "0": False, "false": False, "": False}
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value.lower() not in words:
        raise ValueError("expected 1 or 0")
    return words[value.lower()]


def to_positive(value: object) -> int:
    """Return *value*, a number from 1 to 1024."""
    return _whole(value, 1, 1024, "a number from 1 to 1024")


def to_node_count(value: object) -> int:
    """Return *value*, a number of nodes from 1 to `NODES_MAX`."""
    return _whole(value, 1, NODES_MAX, f"a number of nodes from 1 to {NODES_MAX}")


def seconds_up_to(max_s: float) -> Callable[[object], float]:
    """Return a reader of seconds above zero, up to *max_s*."""

    def parse(value: object) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            seconds = float(value)
        else:
            seconds = parse_seconds(to_text(value))
        if not 0 < seconds <= max_s:
            raise ValueError(f"expected seconds above zero, up to {max_s:g}")
        return seconds

    return parse


NODES_MAX = 65_536
RESTARTS_MAX = 1_000_000
# With a window, the control record keeps the time of each; every agent reads it at each change.
WINDOW_RESTARTS_MAX = 1000
DURATION_S_MAX = 30 * 86_400.0
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


def parse_restarts(text: str) -> tuple[int, float | None]:
    """Return the budget in ``10`` or ``10/6h``: restarts, and the window in seconds if any."""
    number, slash, window = text.partition("/")
    if not number.strip().isdecimal() or int(number) > RESTARTS_MAX:
        raise ValueError("expected a number of restarts, or a number in a window as in 10/6h")
    window_s = _parse_seconds(window) if slash else None
    if window_s is not None and window_s < WINDOW_S_MIN:
        raise ValueError(f"no two restarts fit into {window_s:g} s; expected a window as in 10/6h")
    if window_s is not None and int(number) > WINDOW_RESTARTS_MAX:
        raise ValueError(f"expected at most {WINDOW_RESTARTS_MAX} restarts in a window")
    return int(number), window_s


def parse_node_count(text: str) -> int:
    """Return a number of nodes, at least 1."""
    if not text.isdecimal() or not 1 <= int(text) <= NODES_MAX:
        raise ValueError("expected a number of nodes, at least 1")
    return int(text)


def parse_spare_count(text: str) -> int:
    """Return a number of nodes, which may be 0."""
    return 0 if text.isdecimal() and int(text) == 0 else parse_node_count(text)


def parse_on_exhausted(text: str) -> str:
    """Return ``shrink`` or ``requeue``."""
    if text not in ("shrink", "requeue"):
        raise ValueError("expected shrink or requeue")
    return text


def parse_preflight(text: str) -> str:
    """Return ``off``, ``quick`` or ``sweep``."""
    if text not in ("off", "quick", "sweep"):
        raise ValueError("expected off, quick or sweep")
    return text


def parse_hang_timeout(text: str) -> float | None:
    """Return after how many seconds without a step a run hangs; None: learned; 0: never."""
    if text == "auto":
        return None
    return 0.0 if text == "off" else _parse_seconds(text, ", auto or off")


def parse_slow_after(text: str) -> float:
    """Return for how many seconds a rank must be slower than its peers; 0: never looked at."""
    return 0.0 if text == "off" else _parse_seconds(text, " or off")


def parse_switch(text: str) -> bool:
    """Return whether *text* is ``on``."""
    words = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}
    if text.lower() not in words:
        raise ValueError("expected on or off")
    return words[text.lower()]


def parse_grow_after(text: str) -> float | None:
    """Return the seconds after which a run may take more nodes in; None: never."""
    return None if text == "never" else _parse_seconds(text, " or never")


def parse_drain_grace(text: str) -> float:
    """Return the seconds between the scheduler's notice and its SIGKILL."""
    return _parse_seconds(text)


def parse_replicas(text: str) -> int:
    """Return how many nodes hold each checkpoint, from 1 to `REPLICAS_MAX`."""
    if not text.isdecimal() or not 1 <= int(text) <= REPLICAS_MAX:
        raise ValueError(f"expected a number from 1 to {REPLICAS_MAX}")
    return int(text)


def parse_http_address(text: str) -> tuple[str, int | None]:
    """Return the address and port to listen on, 0 for any free one; a port of None: none at all."""
    if text == "off":
        return LOOPBACK, None
    address, colon, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65_535:
        raise ValueError("expected ADDRESS:PORT, PORT or off")
    if not colon:
        return LOOPBACK, int(port)
    address = address.removeprefix("[").removesuffix("]")
    try:
        return str(ipaddress.ip_address(address)), int(port)
    except ValueError:
        raise ValueError(f"{address!r} is not an IP address; expected ADDRESS:PORT") from None


def parse_exit_codes(text: str) -> frozenset[int]:
    """Return the exit codes in ``16,17``; none in an empty text."""
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if not all(word.isdecimal() and 0 < int(word) < 256 for word in words):
        raise ValueError("expected exit codes from 1 to 255, as in 16,17")
    return frozenset(map(int, words))


def parse_function_name(text: str) -> str:
    """Return *text* where it names a function, as in ``site.policy:decide``."""
    if _FUNCTION.fullmatch(text) is None:
        raise ValueError("expected the name of a function, as in site_policy:decide")
    return text


def parse_absolute_path(text: str) -> str:
    """Return *text*, an absolute path."""
    if not Path(text).expanduser().is_absolute():
        raise ValueError("expected an absolute path")
    return text


def parse_checkpoint_mode(text: str) -> bool:
    """Return whether checkpoints are kept in memory: ``auto`` or ``off``."""
    if text not in ("auto", "off"):
        raise ValueError("expected auto or off")
    return text == "auto"


def parse_directory(text: str) -> str:
    """Return *text*, a directory or the URL of one; its ``~`` is not expanded yet."""
    if not text.strip() or "\0" in text:
        raise ValueError("expected a directory, or a URL such as s3://bucket/name")
    return text


def parse_domain(text: str) -> str:
    """Return *text*: ``auto``, ``off``, a path of names like row1/rack3, or an absolute file."""
    names = text.split("/")
    is_path = len(names) <= DOMAIN_LEVELS_MAX and all(map(_DOMAIN_NAME.fullmatch, names))
    if not is_path and not (is_domain_file(text) and "\0" not in text):
        raise ValueError("expected auto, off, a path like row1/rack3, or an absolute file")
    return text


def is_domain_file(text: str) -> bool:
    """Return whether *text* names a file of failure domains, not a domain."""
    return text.startswith(("/", "~"))


def parse_duration(text: str) -> float:
    """Return a time in seconds."""
    return _parse_seconds(text)


def _parse_seconds(text: str, also_allowed: str = "") -> float:
    try:
        seconds = parse_seconds(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= DURATION_S_MAX:
        raise ValueError(
            f"expected a time as in 90, 90s or 2h{also_allowed}, up to "
            f"{DURATION_S_MAX / 86400:g} days"
        )
    return seconds


def _validated_text(parser: Callable[[str], object]) -> Callable[[object], str]:
    """Return a parser of TOML values that returns their text once *parser* accepts it."""

    def parse(value: object) -> str:
        text = _as_text(value)
        parser(text)
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
        raise ValueError("expected text or a number")  # noqa: TRY004 parsers raise ValueError
    return value


def _run_setting(
    name: str,
    parser: Callable[[str], object],
    default: str | None,
    help: str,  # noqa: A002 the field's name
) -> Setting:
    env = f"GPUOPS_{name.upper()}"
    return Setting(f"run.{name}", env, _validated_text(parser), lambda _env, _root: default, help)


def _checkpoint_setting(
    name: str,
    env: str,
    parser: Callable[[str], object],
    default: str | None,
    help: str,  # noqa: A002 the field's name
) -> Setting:
    return Setting(
        f"checkpoint.{name}", env, _validated_text(parser), lambda _env, _root: default, help
    )


RUN_SETTINGS = (
    _run_setting("spares", parse_spare_count, "0", "spare agents, which wait to replace a node"),
    _run_setting(
        "min_nodes",
        parse_node_count,
        None,
        "the least nodes to train with; unset: MIN of --nnodes=MIN:MAX",
    ),
    _run_setting(
        "node_unit", parse_node_count, "1", "the number of training nodes is a multiple of this"
    ),
    _run_setting(
        "max_restarts",
        parse_restarts,
        RESTARTS_DEFAULT,
        "restarts before the run fails: 3 (of the entire run), or 10/6h (ten in any six hours)",
    ),
    _run_setting(
        "on_exhausted",
        parse_on_exhausted,
        None,
        "with too few nodes: shrink, or requeue (exit 85); unset: shrink if fewer are allowed",
    ),
    _run_setting(
        "hang_timeout",
        parse_hang_timeout,
        "auto",
        "time without a step that counts as a hang: auto (learned from the job), seconds, off",
    ),
    _run_setting(
        "slow_after",
        parse_slow_after,
        "60",
        "how long a rank must be slower than its peers to be reported: seconds, off",
    ),
    _run_setting(
        "health_gate", parse_switch, "on", "check a node before it joins and after each failure"
    ),
    _run_setting(
        "preflight", parse_preflight, "off", "test nodes before the first start: quick, sweep, off"
    ),
    _run_setting(
        "record_steps", parse_switch, "off", "write each step of each rank into the run's folder"
    ),
    _run_setting(
        "grow_after",
        parse_grow_after,
        GROW_AFTER_DEFAULT,
        "how long a new node waits before the run restarts to include it, or never",
    ),
    _run_setting(
        "drain_grace",
        parse_drain_grace,
        None,
        "seconds from the scheduler's notice to its SIGKILL; unset: from Slurm",
    ),
    _run_setting(
        "http",
        parse_http_address,
        "0",
        "where an agent serves HTTP: PORT on loopback, ADDRESS:PORT, or off",
    ),
    _run_setting(
        "restart_exit_codes",
        parse_exit_codes,
        "",
        "exit codes with which the job asks for a restart, as in 16,17",
    ),
    _run_setting(
        "decide",
        parse_function_name,
        None,
        "a function of the site that may override the restart decision",
    ),
    _run_setting(
        "token_file",
        parse_absolute_path,
        None,
        "a file with the token that authenticates the agents of a run (or GPUOPS_TOKEN)",
    ),
    _run_setting(
        "insecure", parse_switch, "off", "runs on several nodes without a token, open as torchrun's"
    ),
    _run_setting(
        "exit_code_file",
        parse_absolute_path,
        None,
        "an existing file to write the run's exit code to: srun returns that of a killed task",
    ),
)


def _retention(table: str, days: int, what: str) -> Setting:
    return Setting(
        f"retention.{table}_days",
        f"GPUOPS_RETENTION_{table.upper()}_DAYS",
        to_days,
        lambda _env, _root: days,
        f"days after which `gpuops db prune` deletes {what}; 0: never",
    )


RETENTION_SETTINGS = (
    _retention("events", 400, "events and evidence"),
    _retention("checks", 400, "check runs, burn-ins and sweeps with their results"),
    _retention("samples", 90, "the hourly values of checks"),
    _retention("progress", 90, "the progress of runs by the minute"),
)
CHECKPOINT_SETTINGS = (
    _checkpoint_setting(
        "keeper",
        "GPUOPS_CKPT",
        parse_checkpoint_mode,
        "auto",
        "auto: gpuops run starts a process that holds checkpoints in memory; off: it does not",
    ),
    _checkpoint_setting(
        "directory",
        "GPUOPS_CKPT_DIR",
        parse_directory,
        None,
        "where checkpoints persist: a directory or a URL; unset: what the script says, if anything",
    ),
    _checkpoint_setting(
        "lease",
        "GPUOPS_CKPT_LEASE",
        parse_duration,
        LEASE_DEFAULT,
        "how long checkpoints stay in memory after the agent was killed",
    ),
    _checkpoint_setting(
        "replicas",
        "GPUOPS_CKPT_REPLICAS",
        parse_replicas,
        "2",
        "how many nodes of a run hold each checkpoint in memory, including the one that saved it",
    ),
    _checkpoint_setting(
        "domain",
        "GPUOPS_CKPT_DOMAIN",
        parse_domain,
        "auto",
        "the failure domain of a node; copies lie in others: auto (the switches in Slurm's "
        "topology), off, a path like row1/rack3, or a file (topology.conf, or labels)",
    ),
    _checkpoint_setting(
        "last_save",
        "GPUOPS_CKPT_LAST_SAVE",
        parse_duration,
        LAST_SAVE_DEFAULT,
        "how long the end of a run waits at most until its newest checkpoint has persisted",
    ),
)
