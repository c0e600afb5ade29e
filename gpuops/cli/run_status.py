"""``gpuops run status``: the live state of a run, from any node that can read its folder."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import click
from rich.console import Console
from rich.live import Live

from gpuops.agent.launch.job_token import given_token, own_token_file, read_own_token
from gpuops.agent.launch.plan import EndpointKind
from gpuops.cli.history import open_history
from gpuops.cli.options import json_option, settings_of, store_option
from gpuops.config.resolve import Settings, environ
from gpuops.control.etcd.address import EtcdAddress
from gpuops.control.etcd.member import connect_as_guest
from gpuops.control.etcd.quorum import QUORUM_KIND
from gpuops.control.etcd.store import EtcdControlStore
from gpuops.control.store import ControlStore
from gpuops.control.tcp.store import TcpControlStore
from gpuops.errors import GpuopsError, UsageError
from gpuops.host.clock import Clock, SystemClock
from gpuops.host.node_state import node_name
from gpuops.host.trust import current_uid
from gpuops.model import envelope
from gpuops.report.render.run_text import status_view
from gpuops.report.run_status import (
    find_run_folder,
    query_agent,
    read_control_store,
    read_states,
    run_names,
)
from gpuops.report.run_view import (
    RunView,
    from_agent,
    from_files,
    from_store,
    int_or_none,
    text_or_empty,
)
from gpuops.store.history import load_journal
from gpuops.store.queries import run_queries
from gpuops.units import NS_PER_S

REFRESH_S = 1.0
SPARE_DEAD_S = 3.0  # an agent sends a heartbeat every second
CONTROL_TIMEOUT_S = 3.0
NAMES_MAX = 5
SCHEMA = "gpuops.run-status/1"


run_dir_option = click.option(
    "--run-dir",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="The folder of the run, or the one that holds those of several runs.",
)


@click.command("status", epilog="Example: gpuops run status")
@click.argument("run", required=False)
@run_dir_option
@click.option("--watch/--once", "watch", default=None, help="Follow it; default on a terminal.")
@store_option
@json_option
@click.pass_context
def status(
    ctx: click.Context,
    run: str | None,
    run_dir: Path | None,
    store: str | None,
    *,
    watch: bool | None,
    as_json: bool,
) -> int:
    """Show the state of RUN: its phase and the reason, nodes, ranks, steps, excluded nodes.

    RUN is the end (or the beginning) of a run's id; without it, the newest run of the folder.
    """
    settings = settings_of(ctx, store__url=store)
    with RunWatcher(settings, run_dir or settings.run_dir, run, SystemClock()) as watcher:
        view = watcher.refresh()
        if view is None and run_dir is not None:
            wanted = f"run {run}" if run else "run"
            there = f", but {_listed(names)}" if (names := run_names(run_dir)) else ""
            raise UsageError(
                f"there is no {wanted} in {run_dir}{there}; without --run-dir the store is asked"
            )
        view = view or _from_store(ctx, store, run)
        if run_dir is not None and run is None and len(names := run_names(run_dir)) > 1:
            note = f"the newest of {len(names)} runs in {run_dir}; the others: {_listed(names[1:])}"
            view = replace(view, notes=(*view.notes, note))
        follows = not as_json and (sys.stdout.isatty() if watch is None else watch)
        if not follows:
            view = refresh_without_dead_spares(view, watcher.refresh, SystemClock(), time.sleep)
        if as_json:
            click.echo(json.dumps(envelope(SCHEMA, view.to_json()), indent=2))
            return 0
        console = Console(highlight=False)
        if not follows or view.source == "store":
            console.print(status_view(view))
            return 0
        _follow(watcher, view, console)
    return 0


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return f"{', '.join(names[:NAMES_MAX])}{more}"


@dataclass(slots=True)
class StatusHistory:
    """What follows from several polls: steps a second, and agents without new heartbeats."""

    _first: tuple[int, int] | None = None
    _seen: dict[str, tuple[int, int]] = field(default_factory=dict)

    def rate(self, step: int | None, now_ns: int) -> float | None:
        """Return the steps a second since the first poll, or since steps were repeated."""
        first = self._first
        if step is None or first is None or step < first[0]:
            self._first = None if step is None else (step, now_ns)
            return None
        passed_s = (now_ns - first[1]) / NS_PER_S
        return (step - first[0]) / passed_s if passed_s > 0 else None

    def silent_s(self, view: RunView, now_ns: int) -> dict[str, float]:
        """Return for how long each agent's sequence number has not changed."""
        found = {}
        assigned = {node.node: node.seq for node in view.nodes if node.seq is not None}
        for name, newest in {**view.spare_seqs, **assigned}.items():
            seq, since_ns = self._seen.get(name, (-1, now_ns))
            if newest != seq:
                since_ns = now_ns
            self._seen[name] = (newest, since_ns)
            found[name] = (now_ns - since_ns) / NS_PER_S
        return found


def refresh_without_dead_spares(
    first: RunView,
    refresh: Callable[[], RunView | None],
    clock: Clock,
    sleep: Callable[[float], object],
) -> RunView:
    """Return *first*; if it has spares, a later view without those that sent no heartbeat since."""
    if not first.spare_seqs:
        return first
    history = StatusHistory()
    history.silent_s(first, clock.mono_ns())
    sleep(SPARE_DEAD_S)
    newer = refresh() or first
    return newer.without_dead(history.silent_s(newer, clock.mono_ns()), SPARE_DEAD_S)


class RunWatcher:
    """Polls one run from the best available source; keeps its connection open."""

    def __init__(
        self, settings: Settings, parent: Path, run_id_part: str | None, clock: Clock
    ) -> None:
        self._settings = settings
        self._parent = parent
        self._run_id_part = run_id_part
        self._clock = clock
        self._control_store: ControlStore | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._control_store is not None:
            self._control_store.close()

    def refresh(self) -> RunView | None:
        """Return the state of the run, None without its folder."""
        folder = run_folder(self._parent, self._run_id_part)
        found = [] if folder is None else list(read_states(folder))
        if not found:
            return None
        view, notes = self._from_control_store(found)
        if view is None:
            view = self._from_agent(found)
        if view is None:
            view = from_files(found)
            if view.is_over and folder is not None:
                return _with_end(view, folder, self._clock.now_us())
            notes = (*notes, "from the run's folder, which may be out of date")
        if view.restarts_max is None:
            view = replace(view, restarts_max=from_files(found).restarts_max)
        return replace(view, notes=notes)

    def _from_control_store(
        self, found: list[dict[str, Any]]
    ) -> tuple[RunView | None, tuple[str, ...]]:
        address = found[0].get("board")
        if not isinstance(address, Mapping):
            return None, ()
        try:
            if self._control_store is None:
                self._control_store = connect_control_store(address, self._settings)
            view = None if self._control_store is None else read_control_store(self._control_store)
        except GpuopsError as exc:
            return None, (f"the control store does not answer: {exc}",)
        if view is not None and view.run_id != found[0].get("run_id"):
            return None, ("the control store is used by another run now",)
        return view, ()

    def _from_agent(self, found: list[dict[str, Any]]) -> RunView | None:
        node = node_name(environ())
        ports = [state.get("http_port") for state in found if state.get("node") == node]
        agent_state = next((state for port in ports if (state := query_agent(port))), None)
        if agent_state is None or agent_state.get("run_id") != found[0].get("run_id"):
            return None
        return from_agent(agent_state)


def _with_end(view: RunView, folder: Path, now_us: int) -> RunView:
    """Return *view* of an ended run's files with when and how it ended, by its journal."""
    try:
        with load_journal(folder / "journal") as opened, opened.begin() as connection:
            run = run_queries.find_run(connection, view.run_id)
            ended = from_store(run, (), (), (), now_us)
    except GpuopsError as exc:
        return replace(view, notes=(*view.notes, f"its journal cannot be read: {exc}"))
    return replace(view, phase_s=ended.phase_s, exit_code=ended.exit_code, reason=ended.reason)


def run_folder(parent: Path, run_id_part: str | None) -> Path | None:
    """Return *parent* where it is a run's folder, else the run's folder in it, None without one."""
    return parent if any(read_states(parent)) else find_run_folder(parent, run_id_part)


def connect_control_store(address: Mapping[str, Any], settings: Settings) -> ControlStore | None:
    """Return the control store at *address*, None if another process cannot reach it.

    Raises:
        GpuopsError: The token is invalid, or the driver is missing.
    """
    kind, run_key = address.get("kind"), text_or_empty(address.get("run_key"))
    token = "" if address.get("insecure") else _token(settings)
    if kind == EndpointKind.TCP:
        host, port = text_or_empty(address.get("host")), int_or_none(address.get("port"))
        if not host or port is None or not 0 < port < 2**16:
            return None
        return TcpControlStore(
            host, port, run_key=run_key, token=token, deadline_s=CONTROL_TIMEOUT_S
        )
    if kind in {EndpointKind.ETCD, QUORUM_KIND}:
        url = text_or_empty(address.get("endpoint"))
        # A password is not written down where other users read.
        if not url or EtcdAddress.parse(url).user:
            return None
        connect = EtcdControlStore if kind == EndpointKind.ETCD else connect_as_guest
        return connect(url, run_key=run_key, token=token, deadline_s=CONTROL_TIMEOUT_S)
    if kind == EndpointKind.POSTGRES and not settings.store_is_default:
        # psycopg is an optional dependency.
        from gpuops.control.postgres.store import PostgresControlStore

        return PostgresControlStore(
            settings.store_url, run_key=run_key, token=token, deadline_s=CONTROL_TIMEOUT_S
        )
    return None


def _token(settings: Settings) -> str:
    value = settings.values.get("run.token_file")
    path = str(value.value) if value is not None and value.value else None
    given = given_token(environ(), path, current_uid())
    with contextlib.suppress(OSError):
        return given or read_own_token(own_token_file(settings.state_dir), current_uid())
    return ""


def _from_store(ctx: click.Context, store: str | None, run_id_part: str | None) -> RunView:
    with open_history(ctx, store, None) as opened, opened.begin() as connection:
        run = run_queries.find_run(connection, run_id_part)
        view = from_store(
            run,
            run_queries.attempts(connection, run.id),
            run_queries.decisions(connection, run.id),
            run_queries.exclusions(connection, run.id),
            SystemClock().now_us(),
        )
        return replace(view, notes=("from the store, which may be out of date", *opened.notes))


def _follow(
    watcher: RunWatcher,
    first: RunView,
    console: Console,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show the run until it has ended or Ctrl-C."""
    view: RunView | None = first
    history, clock = StatusHistory(), SystemClock()
    with Live(console=console, auto_refresh=False) as live:
        while view is not None:
            now_ns = clock.mono_ns()
            rate, silent_s = history.rate(view.step, now_ns), history.silent_s(view, now_ns)
            view = view.without_dead(silent_s, SPARE_DEAD_S)
            live.update(status_view(view, rate=rate, silent_s=silent_s), refresh=True)
            if view.is_over:
                return
            sleep(REFRESH_S)
            view = watcher.refresh()
