"""Settings: flag > ``GPUOPS_*`` > file > default, each value with its origin.

This is the only module that reads ``os.environ``. Components take values, never `Settings`.
The file is TOML: ``--config``, else ``GPUOPS_CONFIG``, else the first that exists of
``$XDG_CONFIG_HOME/gpuops/gpuops.toml`` (not for root) and ``/etc/gpuops/gpuops.toml``.
"""

import difflib
import logging
import os
import stat
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from gpuops.config.burnin_schema import BURNIN_SETTINGS
from gpuops.config.schema import (
    CHECKPOINT_SETTINGS,
    RETENTION_SETTINGS,
    RUN_SETTINGS,
    Setting,
    SettingValue,
    seconds_up_to,
    to_bool,
    to_count,
    to_node_count,
    to_path,
    to_positive,
    to_size,
    to_text,
)
from gpuops.errors import ConfigError
from gpuops.scrub import scrub

_log = logging.getLogger(__name__)

T = TypeVar("T")
ErrorHandler = Callable[[ConfigError], None]

SYSTEM_FILE = Path("/etc/gpuops/gpuops.toml")
# A hundred times the size of the largest shipped file.
TOML_BYTES_MAX = 4 * 2**20


class GateMode(StrEnum):
    """Whether the gate only reports what it would do, or does it."""

    OBSERVE = "observe"
    ENFORCE = "enforce"


def raise_error(error: ConfigError) -> None:
    """Raise *error*: the error handler of callers that do not collect errors."""
    raise error


def read_or_default(read: Callable[[], T], on_error: ErrorHandler, default: T) -> T:
    """Return what *read* returns, or *default* after *on_error* has received its ConfigError."""
    try:
        return read()
    except ConfigError as exc:
        on_error(exc)
        return default


def environ() -> dict[str, str]:
    """Return a copy of this process' environment, to be passed as an argument."""
    return dict(os.environ)


def update_environ(values: Mapping[str, str]) -> None:
    """Set in this process' environment what torch itself reads there and workers inherit."""
    os.environ.update(values)


def unset_environ(names: Iterable[str]) -> None:
    """Remove from this process' environment what its children must not inherit."""
    for name in names:
        os.environ.pop(name, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting, resolved. ``values`` keeps the origins for ``gpuops config show``."""

    store_url: str
    store_is_default: bool
    spool_dir: Path
    spool_bytes_max: int
    spool_users_dir: Path
    state_dir: Path
    run_dir: Path
    cluster: str
    root: Path
    disabled: bool
    suite: str
    gpus_expected: int | None
    site_dir: Path | None
    profile: str | None
    mode: GateMode
    fuse_nodes: int | None
    fuse_window_s: float
    max_drained: int | None
    passes_to_resume: int
    resumes_max_per_day: int
    permit_deadline_s: float
    slurm_bin_dir: Path | None
    values: Mapping[str, SettingValue]
    file: Path | None


def _parse_mode(value: object) -> GateMode:
    if value not in list(GateMode):
        raise ValueError(f"expected one of {', '.join(GateMode)}")
    return GateMode(str(value))


def _state_dir(env: Mapping[str, str], is_root: bool) -> Path:
    if is_root:
        return Path("/var/lib/gpuops")
    home = env.get("XDG_STATE_HOME") or f"{env.get('HOME', '/nonexistent')}/.local/state"
    return Path(home) / "gpuops"


def state_dir_of(env: Mapping[str, str], *, is_root: bool) -> Path:
    """Return the state directory by *env* alone, for a process that reads no configuration file."""
    given = env.get("GPUOPS_STATE")
    return Path(given) if given else _state_dir(env, is_root)


def _default_store(env: Mapping[str, str], is_root: bool) -> str:
    return f"sqlite:///{quote(str(_state_dir(env, is_root) / 'gpuops.db'))}"


def _default_spool(env: Mapping[str, str], is_root: bool) -> Path:
    return Path("/var/spool/gpuops") if is_root else _state_dir(env, is_root) / "spool"


SETTINGS = (
    Setting("store.url", "GPUOPS_STORE", to_text, _default_store, "the incident store"),
    Setting(
        "spool.dir", "GPUOPS_SPOOL", to_path, _default_spool, "where events wait for the store"
    ),
    Setting(
        "spool.bytes_max",
        "GPUOPS_SPOOL_BYTES_MAX",
        to_size,
        lambda _env, _root: 256 * 2**20,
        "oldest events go first above this size",
    ),
    Setting(
        "spool.users_dir",
        "GPUOPS_SPOOL_USERS",
        to_path,
        lambda _env, _root: Path("/var/spool/gpuops-users"),
        "the spools of users, which root forwards to its store, if this directory exists",
    ),
    Setting("state.dir", "GPUOPS_STATE", to_path, _state_dir, "gpuops' own files on this node"),
    Setting(
        "run.dir",
        "GPUOPS_RUN_DIR",
        to_path,
        lambda _env, _root: Path("gpuops-runs"),
        "the parent of run folders, which hold logs and the journal of a run",
    ),
    Setting("cluster.name", "GPUOPS_CLUSTER", to_text, lambda _e, _r: "default", "this cluster"),
    Setting(
        "host.root", "GPUOPS_ROOT", to_path, lambda _e, _r: Path("/"), "a fake root, for tests"
    ),
    Setting("worker.disable", "GPUOPS_DISABLE", to_bool, lambda _e, _r: False, "1: no worker shim"),
    Setting("check.suite", "GPUOPS_SUITE", to_text, lambda _e, _r: "default", "suite to run"),
    Setting(
        "check.gpus_expected",
        "GPUOPS_GPUS_EXPECTED",
        to_count,
        lambda _env, _root: None,
        "GPUs this node must have; unset: what the PCI bus shows",
    ),
    Setting(
        "check.site_dir",
        "GPUOPS_SITE_DIR",
        to_path,
        lambda _env, _root: None,
        "the site's own suites, rules, profiles, silences and checks",
    ),
    Setting(
        "check.profile",
        "GPUOPS_PROFILE",
        to_text,
        lambda _env, _root: None,
        "the hardware profile of this node, by name or file; unset: the one that matches it",
    ),
    Setting(
        "gate.mode",
        "GPUOPS_MODE",
        _parse_mode,
        lambda _env, _root: GateMode.OBSERVE,
        "observe: report what would be drained; enforce: drain it",
    ),
    Setting(
        "gate.fuse_nodes",
        "GPUOPS_FUSE_NODES",
        to_node_count,
        lambda _env, _root: None,
        "the fuse trips when more nodes than this fail the same check within the window; unset: "
        "3, or 2 % of the nodes seen in 24 h if that is more",
    ),
    Setting(
        "gate.fuse_window_s",
        "GPUOPS_FUSE_WINDOW_S",
        seconds_up_to(7 * 86400),
        lambda _env, _root: 600.0,
        "the window of the fuse, in seconds",
    ),
    Setting(
        "gate.max_drained",
        "GPUOPS_MAX_DRAINED",
        to_node_count,
        lambda _env, _root: None,
        "how many nodes gpuops may have drained while a fuse is tripped; unset: 3, or 10 % of the "
        "nodes seen in 24 h if that is more",
    ),
    Setting(
        "gate.passes_to_resume",
        "GPUOPS_PASSES_TO_RESUME",
        to_positive,
        lambda _env, _root: 2,
        "consecutive passes after which gpuops resumes a node that it drained",
    ),
    Setting(
        "gate.resumes_max_per_day",
        "GPUOPS_RESUMES_MAX_PER_DAY",
        to_count,
        lambda _env, _root: 3,
        "how often in 24 h gpuops resumes a node that it drained for the same check; 0: never",
    ),
    Setting(
        "gate.permit_deadline_s",
        "GPUOPS_PERMIT_DEADLINE_S",
        seconds_up_to(60),
        lambda _env, _root: 1.0,
        "how long a drain waits for the store's permit, in seconds",
    ),
    Setting(
        "slurm.bin_dir",
        "GPUOPS_SLURM_BIN_DIR",
        to_path,
        lambda _env, _root: None,
        "the folder of scontrol; unset: the folders of Debian, RPMs and /opt/slurm",
    ),
    *BURNIN_SETTINGS,
    *RETENTION_SETTINGS,
    *RUN_SETTINGS,
    *CHECKPOINT_SETTINGS,
)
_BY_KEY = {setting.key: setting for setting in SETTINGS}


def resolve(
    flags: Mapping[str, object],
    env: Mapping[str, str],
    *,
    config_file: Path | None = None,
    is_root: bool,
    check_file: Callable[[Path], None] = lambda _path: None,
    on_error: ErrorHandler = raise_error,
) -> Settings:
    """Return every setting, from the most specific source that has it.

    Args:
        flags: Values given on the command line by setting key; None means not given.
        env: The environment.
        config_file: ``--config``; it must exist, as must the one in ``GPUOPS_CONFIG``.
        is_root: Root has system directories and trusts only system files.
        check_file: Is called with the file before it is read; raises if it is not trusted.
        on_error: Receives each error; if it does not raise, the default is used.

    Raises:
        ConfigError: A missing file, one that is not TOML, an unknown key, a bad value.
    """
    file = read_or_default(lambda: find_file(config_file, env, is_root=is_root), on_error, None)
    no_settings: Mapping[str, object] = {}
    table = read_or_default(lambda: _read_table(file, check_file, on_error), on_error, no_settings)
    resolved = {}
    for setting in SETTINGS:
        default = SettingValue(setting.default(env, is_root), "default")
        lookup = partial(_lookup, setting, flags, env, table, file)
        resolved[setting.key] = read_or_default(lookup, on_error, None) or default
    value = {key: item.value for key, item in resolved.items()}
    return Settings(
        store_url=value["store.url"],
        store_is_default=resolved["store.url"].origin == "default",
        spool_dir=value["spool.dir"],
        spool_bytes_max=value["spool.bytes_max"],
        spool_users_dir=value["spool.users_dir"],
        state_dir=value["state.dir"],
        run_dir=value["run.dir"],
        cluster=value["cluster.name"],
        root=value["host.root"],
        disabled=value["worker.disable"],
        suite=value["check.suite"],
        gpus_expected=value["check.gpus_expected"],
        site_dir=value["check.site_dir"],
        profile=value["check.profile"],
        mode=value["gate.mode"],
        fuse_nodes=value["gate.fuse_nodes"],
        fuse_window_s=value["gate.fuse_window_s"],
        max_drained=value["gate.max_drained"],
        passes_to_resume=value["gate.passes_to_resume"],
        resumes_max_per_day=value["gate.resumes_max_per_day"],
        permit_deadline_s=value["gate.permit_deadline_s"],
        slurm_bin_dir=value["slurm.bin_dir"],
        values=resolved,
        file=file,
    )


def _read_table(
    file: Path | None, check_file: Callable[[Path], None], on_error: ErrorHandler
) -> Mapping[str, object]:
    """Return the valid settings in *file* by key."""
    if file is None:
        return {}
    check_file(file)
    table = flatten(read_toml(file))
    reject_unknown(table, _BY_KEY, f"the configuration {file}", on_error)
    valid = {}
    for key in [item for item in table if item in _BY_KEY]:
        try:
            _parse_value(_BY_KEY[key], table[key], f"file {file}")
        except ConfigError as exc:
            on_error(exc)  # also where a flag or the environment takes precedence
        else:
            valid[key] = table[key]
    return valid


def _lookup(
    setting: Setting,
    flags: Mapping[str, object],
    env: Mapping[str, str],
    table: Mapping[str, object],
    file: Path | None,
) -> SettingValue | None:
    if flags.get(setting.key) is not None:
        return _parse_value(setting, flags[setting.key], "flag")
    if env.get(setting.env):
        return _parse_value(setting, env[setting.env], f"environment {setting.env}")
    if setting.key in table:
        return _parse_value(setting, table[setting.key], f"file {file}")
    return None


def _parse_value(setting: Setting, raw: object, origin: str) -> SettingValue:
    try:
        return SettingValue(setting.parse(raw), origin)
    except ValueError as exc:
        scrubbed = scrub(str(raw))
        raise ConfigError(f"{setting.key} = {scrubbed!r} ({origin}): {exc}") from exc


def find_file(explicit: Path | None, env: Mapping[str, str], *, is_root: bool) -> Path | None:
    """Return the configuration file to read, or None.

    A default file that this user may not read counts as absent, with a warning: the
    home in the environment may be another user's (``su`` without ``-``, a squashed root).

    Raises:
        ConfigError: A named file does not exist or is not a file.
    """
    named = explicit or (Path(env["GPUOPS_CONFIG"]) if env.get("GPUOPS_CONFIG") else None)
    if named is not None:
        if not named.exists():
            raise ConfigError(f"the configuration file {named} does not exist")
        if not named.is_file():
            raise ConfigError(f"the configuration file {named} is not a file")
        return named
    candidates = [SYSTEM_FILE]
    if not is_root:
        home = env.get("XDG_CONFIG_HOME") or f"{env.get('HOME', '/nonexistent')}/.config"
        candidates.insert(0, Path(home) / "gpuops" / "gpuops.toml")
    return next((path for path in candidates if _is_readable(path)), None)


def _is_readable(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
    except PermissionError:
        _log.warning("ignored %s: this user may not read its directory", path)
        return False
    if os.access(path, os.R_OK):
        return True
    _log.warning("ignored %s: this user may not read it", path)
    return False


def read_toml(path: Path) -> dict[str, Any]:
    """Return the TOML table in *path*.

    Raises:
        ConfigError: Unreadable or malformed; says where.
    """
    try:
        return tomllib.loads(_read_bytes(path).decode())
    except OSError as exc:
        raise ConfigError(f"cannot read {path} as TOML: {exc.strerror}") from exc
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"cannot read {path} as TOML: {exc}") from exc
    except RecursionError:
        raise ConfigError(f"cannot read {path} as TOML: it is nested too deeply") from None


def _read_bytes(path: Path) -> bytes:
    # Opening a FIFO, or reading a device, could block forever.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ConfigError(f"cannot read {path} as TOML: it is not a file")
        content = file.read(TOML_BYTES_MAX + 1)
    if len(content) > TOML_BYTES_MAX:
        raise ConfigError(f"cannot read {path} as TOML: it has more than {TOML_BYTES_MAX} bytes")
    return content


def flatten(table: Mapping[str, Any]) -> dict[str, object]:
    """Return ``{"store.url": …}`` for ``{"store": {"url": …}}``, one level deep."""
    flat: dict[str, object] = {}
    for section, body in table.items():
        if isinstance(body, dict):
            flat.update({f"{section}.{key}": value for key, value in body.items()})
        else:
            flat[section] = body
    return flat


def reject_unknown(
    keys: Iterable[str], valid: Iterable[str], where: str, on_error: ErrorHandler = raise_error
) -> None:
    """Report each unknown key, with the closest and all valid keys.

    Raises:
        ConfigError: A key of *keys* is not in *valid*.
    """
    known = sorted(valid)
    for key in keys:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            valid_ones = f"(valid: {', '.join(known)})"
            on_error(ConfigError(f"{where} has unknown key {key!r}{hint} {valid_ones}"))
