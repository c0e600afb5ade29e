"""``gpuops run status``: how a run stands, live, from any node that sees its folder."""

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import click
from rich.console import Console
from rich.live import Live

from gpuops.agent.job_token import token_of
from gpuops.agent.plan import MeetingKind
from gpuops.cli.reading import open_history
from gpuops.cli.settings import json_option, settings_of, store_option
from gpuops.config import Settings, environ
from gpuops.control.board import Board
from gpuops.control.tcp_board import TcpBoard
from gpuops.errors import GpuopsError
from gpuops.host.clock import Clock, SystemClock
from gpuops.host.node import node_name
from gpuops.host.trust import current_uid
from gpuops.model import envelope
from gpuops.report.run_look import ask_agent, ask_board, find_folder, states
from gpuops.report.run_view import RunView, of_agent, of_files, of_store, text, whole
from gpuops.report.run_view_text import status_view
from gpuops.store import queries
from gpuops.units import NS_PER_S

EVERY_S = 1.0
SPARE_DEAD_S = 3.0  # an agent beats every second
BOARD_S = 3.0
SCHEMA = "gpuops.run-status/1"


@click.command("status")
@click.argument("run", required=False)
@click.option(
    "--run-dir",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="The folder of the run, or the one that holds those of several runs.",
)
@click.option("--watch/--once", "watch", default=None, help="Follow it; so on a terminal.")
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
    """Show how RUN stands: its phase and why, nodes, ranks, steps, who was left out.

    RUN is the end (or the beginning) of a run's id; without it, the newest run of the folder.
    """
    settings = settings_of(ctx, store__url=store)
    with Onlooker(settings, run_dir or settings.run_dir, run, SystemClock()) as onlooker:
        view = onlooker.look() or _from_store(ctx, store, run)
        follows = not as_json and (sys.stdout.isatty() if watch is None else watch)
        if not follows:
            view = look_twice(view, onlooker.look, SystemClock(), time.sleep)
        if as_json:
            click.echo(json.dumps(envelope(SCHEMA, view.to_json()), indent=2))
            return 0
        console = Console(highlight=False)
        if not follows or view.source == "store":
            console.print(status_view(view))
            return 0
        _follow(onlooker, view, console)
    return 0


@dataclass(slots=True)
class Pace:
    """What several looks tell: steps a second, and whose heartbeat stands still."""

    _first: tuple[int, int] | None = None
    _seen: dict[str, tuple[int, int]] = field(default_factory=dict)

    def rate(self, step: int | None, now_ns: int) -> float | None:
        """Return the steps a second since the first look, or since steps were made again."""
        first = self._first
        if step is None or first is None or step < first[0]:
            self._first = None if step is None else (step, now_ns)
            return None
        passed_s = (now_ns - first[1]) / NS_PER_S
        return (step - first[0]) / passed_s if passed_s > 0 else None

    def silent_s(self, view: RunView, now_ns: int) -> dict[str, float]:
        """Return for how long each agent's sequence number has not moved."""
        found = {}
        seated = {node.node: node.seq for node in view.nodes if node.seq is not None}
        for name, newest in {**view.spare_seqs, **seated}.items():
            seq, since_ns = self._seen.get(name, (-1, now_ns))
            if newest != seq:
                since_ns = now_ns
            self._seen[name] = (newest, since_ns)
            found[name] = (now_ns - since_ns) / NS_PER_S
        return found


def look_twice(
    first: RunView,
    look: Callable[[], RunView | None],
    clock: Clock,
    wait: Callable[[float], object],
) -> RunView:
    """Return *first*; where it has spares, a later look without those that did not beat since."""
    if not first.spare_seqs:
        return first
    pace = Pace()
    pace.silent_s(first, clock.mono_ns())
    wait(SPARE_DEAD_S)
    later = look() or first
    return later.without_dead(pace.silent_s(later, clock.mono_ns()), SPARE_DEAD_S)


class Onlooker:
    """Looks at one run again and again, by the best way there is; keeps the way open."""

    def __init__(self, settings: Settings, parent: Path, wanted: str | None, clock: Clock) -> None:
        self._settings = settings
        self._parent = parent
        self._wanted = wanted
        self._clock = clock
        self._board: Board | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._board is not None:
            self._board.close()

    def look(self) -> RunView | None:
        """Return how the run stands, None where there is no folder of it."""
        folder = self._folder()
        found = [] if folder is None else list(states(folder))
        if not found:
            return None
        view, notes = self._by_board(found)
        if view is None:
            view = self._by_agent(found)
        if view is None:
            view = of_files(found)
            notes = (*notes, "as the run's folder has it, which may be old")
        if view.restarts_max is None:
            view = replace(view, restarts_max=of_files(found).restarts_max)
        return replace(view, notes=notes)

    def _folder(self) -> Path | None:
        if any(states(self._parent)):
            return self._parent
        return find_folder(self._parent, self._wanted)

    def _by_board(self, found: list[dict[str, Any]]) -> tuple[RunView | None, tuple[str, ...]]:
        place = found[0].get("board")
        if not isinstance(place, Mapping):
            return None, ()
        try:
            if self._board is None:
                self._board = connect(place, self._settings)
            view = None if self._board is None else ask_board(self._board)
        except GpuopsError as exc:
            return None, (f"the board does not answer: {exc}",)
        if view is not None and view.run_id != found[0].get("run_id"):
            return None, ("the board holds another run by now",)
        return view, ()

    def _by_agent(self, found: list[dict[str, Any]]) -> RunView | None:
        here = node_name(environ())
        ports = [state.get("http_port") for state in found if state.get("node") == here]
        told = next((state for port in ports if (state := ask_agent(port))), None)
        if told is None or told.get("run_id") != found[0].get("run_id"):
            return None
        return of_agent(told)


def connect(place: Mapping[str, Any], settings: Settings) -> Board | None:
    """Return the board at *place*, None for one that is not reachable from another process.

    Raises:
        GpuopsError: The token is none, or the driver is missing.
    """
    kind, run_key = place.get("kind"), text(place.get("run_key"))
    token = token_of(environ(), _token_file(settings), current_uid())
    if kind == MeetingKind.TCP:
        host, port = text(place.get("host")), whole(place.get("port"))
        if not host or port is None or not 0 < port < 2**16:
            return None
        return TcpBoard(host, port, run_key=run_key, token=token, deadline_s=BOARD_S)
    if kind == MeetingKind.POSTGRES and not settings.store_is_default:
        # psycopg is an extra that only this needs.
        from gpuops.control.postgres_board import PostgresBoard

        return PostgresBoard(settings.store_url, run_key=run_key, token=token, deadline_s=BOARD_S)
    return None


def _token_file(settings: Settings) -> str | None:
    value = settings.values.get("run.token_file")
    shown = None if value is None else value.value
    return str(shown) if shown else None


def _from_store(ctx: click.Context, store: str | None, wanted: str | None) -> RunView:
    with open_history(ctx, store, None) as opened, opened.begin() as connection:
        run = queries.find_run(connection, wanted)
        view = of_store(
            run,
            queries.attempts(connection, run.id),
            queries.decisions(connection, run.id),
            queries.exclusions(connection, run.id),
            SystemClock().now_us(),
        )
        return replace(view, notes=("as the store has it, which may be old", *opened.notes))


def _follow(
    onlooker: Onlooker,
    first: RunView,
    console: Console,
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """Show the run until it is over or Ctrl-C."""
    view: RunView | None = first
    pace, clock = Pace(), SystemClock()
    with Live(console=console, auto_refresh=False) as live:
        while view is not None:
            now_ns = clock.mono_ns()
            rate, silent_s = pace.rate(view.step, now_ns), pace.silent_s(view, now_ns)
            view = view.without_dead(silent_s, SPARE_DEAD_S)
            live.update(status_view(view, rate=rate, silent_s=silent_s), refresh=True)
            if view.is_over:
                return
            wait(EVERY_S)
            view = onlooker.look()
