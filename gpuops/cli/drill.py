"""``gpuops drill``."""

import json
import os
import pwd
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from threading import Event as Pause
from typing import Any

import click

from gpuops.cli.drill_options import FLAGS, RUN_FLAGS, STEP_FLAGS, yes_option
from gpuops.cli.drill_text import listing, said, statement
from gpuops.cli.settings import json_option, settings_of
from gpuops.config import Settings, environ
from gpuops.drill.catalogue import BY_NAME, SCENARIOS, needs_run
from gpuops.drill.fault import Fault, Outcome
from gpuops.drill.inject import inject
from gpuops.drill.kill_rank import LOOK_EVERY_S
from gpuops.drill.published import Published, read_published
from gpuops.drill.random_faults import DEFAULT, HELD_S, draw
from gpuops.drill.record import ended, injected, to_json
from gpuops.drill.scenario import Scenario, Scene, Wanted
from gpuops.drill.step_aim import Aim, has_come_to
from gpuops.errors import EXIT_FAIL, EXIT_OK, DrillError, UsageError
from gpuops.host.clock import SystemClock
from gpuops.host.node import boot_id, node_name
from gpuops.host.trust import current_uid
from gpuops.log import printable
from gpuops.model import envelope
from gpuops.store.recorder import Recorder, spool_recorder

SEED_MAX = 2**31


class _Drill:
    """What all of one command line shares."""

    def __init__(self, ctx: click.Context, options: dict[str, object], *, as_json: bool) -> None:
        self.settings: Settings = settings_of(ctx)
        self.clock = SystemClock()
        self.uid = current_uid()
        self.node = node_name(environ())
        self.as_json = as_json
        self._options = options
        owner = options.get("owner")
        self.owner_uid = self.uid if owner is None else _uid_of(str(owner), self.uid)

    def states(self) -> list[Published]:
        """Return what the run that is meant publishes now."""
        named, pid = self._options.get("run_dir"), self._options.get("pid")
        directory = named if isinstance(named, Path) else self.settings.run_dir
        if pid is None:
            return read_published(directory)
        for folder in (directory, *sorted(_folders(directory), reverse=True)):
            states = read_published(folder)
            if any(pid in {state.agent_pid, *state.pids.values()} for state in states):
                return states
        raise DrillError(f"no run below {directory} has an agent or a worker with pid {pid}")

    def scene(self) -> Scene:
        """Return what there is."""
        return Scene(states=self.states(), uid=self.owner_uid, root=self.settings.root)

    def inject(self, fault: Fault) -> Outcome:
        """Record *fault*, inject it, record what became of it."""
        recorder = self._recorder(fault)
        try:
            told = {"node": self.node, "clock": self.clock, "randomness": os.urandom}
            recorder.record(injected(fault, uid=self.uid, **told))  # type: ignore[arg-type]
            outcome = Outcome(failed=("it was not done",))
            try:
                outcome = inject(fault, self.clock, Pause().wait)
            finally:
                recorder.record(ended(fault, outcome, **told))  # type: ignore[arg-type]
        finally:
            recorder.close()
        return outcome

    def _recorder(self, fault: Fault) -> Recorder:
        # Never into a folder of somebody else's: root would follow their links.
        ours = [s.folder for s in self._known() if s.run_id == fault.run_id] if fault.run_id else []
        return spool_recorder(
            self.settings.spool_dir,
            node=self.node,
            boot_id=boot_id(self.settings.root),
            bytes_max=self.settings.spool_bytes_max,
            clock=self.clock,
            journal=ours[0] / "journal" if ours and self.owner_uid == self.uid else None,
        )

    def _known(self) -> list[Published]:
        try:
            return self.states()
        except DrillError:
            return []


@click.group()
def drill() -> None:
    """Break something on purpose, here, to see that the run recovers.

    Every scenario says first what it will break, for how long, and how that is undone.
    """


@drill.command("list")
@json_option
def list_scenarios(*, as_json: bool) -> None:
    """List what can be broken."""
    if as_json:
        rows = [{"name": item.name, "summary": item.summary} for item in SCENARIOS]
        click.echo(json.dumps(envelope("gpuops.drill-list/1", {"scenarios": rows}), indent=2))
        return
    click.echo(listing(SCENARIOS))


def _command(scenario: Scenario) -> click.Command:
    """Return the command of one scenario: its own options and those of all."""
    of_run = needs_run(scenario)

    def call(ctx: click.Context, /, **options: Any) -> int:  # noqa: ANN401 as click has them
        mine = {name: options[name] for name in scenario.options}
        work = _Drill(ctx, options, as_json=bool(options["as_json"]))
        if of_run and options["at_step"] is not None:
            _wait_for_step(work, options)
        scene = work.scene() if of_run else Scene(uid=work.uid, root=work.settings.root)
        fault = scenario.plan(scene, Wanted(**mine))
        _warn(work)
        _ask(statement(fault), yes=bool(options["yes"]))
        return _tell(work, [(fault, work.inject(fault))])

    command: Callable[..., Any] = click.pass_context(call)
    flags = [FLAGS[name] for name in scenario.options]
    flags += [*RUN_FLAGS, *(STEP_FLAGS if "rank" in scenario.options else ())] if of_run else []
    for flag in reversed([*flags, yes_option, json_option]):
        command = flag(command)
    return click.command(scenario.name, help=scenario.summary)(command)


for _scenario in SCENARIOS:
    drill.add_command(_command(_scenario))


@drill.command("random")
@click.option("--seed", type=click.IntRange(0, SEED_MAX), required=True, help="Draws the faults.")
@click.option("--faults", type=click.IntRange(1, 10_000), default=10, show_default=True)
@click.option("--every", "every_s", type=click.FloatRange(0, 86400), default=30, show_default=True)
@click.option(
    "--scenario", "names", multiple=True, type=click.Choice(sorted(HELD_S)), default=DEFAULT
)
@RUN_FLAGS[0]
@RUN_FLAGS[1]
@RUN_FLAGS[2]
@yes_option
@json_option
@click.pass_context
def random_faults(
    ctx: click.Context,
    /,
    *,
    seed: int,
    faults: int,
    every_s: float,
    names: tuple[str, ...],
    yes: bool,
    as_json: bool,
    **of_run: object,
) -> int:
    """Inject faults that are drawn from a seed, one after the other."""
    work = _Drill(ctx, of_run, as_json=as_json)
    _warn(work)
    _ask(
        f"{faults} faults, one every {every_s:g} s, seed {seed}, out of: {', '.join(names)}.\n"
        "Each is said before it is injected.",
        yes=yes,
    )
    dice, done, pause = Random(seed), [], Pause()  # noqa: S311 to be repeated, not a secret
    for _ in range(faults):
        end_ns = work.clock.mono_ns() + round(every_s * 1e9)
        try:
            scene = work.scene()
            name, wanted = draw(dice, names, scene.states)
            fault = replace(BY_NAME[name].plan(scene, wanted), seed=seed)
            click.echo(statement(fault), err=True)
            done.append((fault, work.inject(fault)))
        except DrillError as exc:
            # The run may be between two generations: the next draw finds it elsewhere.
            click.echo(f"gpuops: {printable(str(exc))}", err=True)
        pause.wait(max(0.0, (end_ns - work.clock.mono_ns()) / 1e9))
    return _tell(work, done)


def _wait_for_step(work: _Drill, options: dict[str, object]) -> None:
    rank = options.get("rank")
    if rank is None:
        raise UsageError("--at-step goes with --rank: whose step counts?")
    generation = options["generation"]
    aim = Aim(
        rank=int(str(rank)),
        at_step=int(str(options["at_step"])),
        generation=None if generation is None else int(str(generation)),
    )
    limit_s, pause = float(str(options["deadline"])), Pause()
    end_ns = work.clock.mono_ns() + round(limit_s * 1e9)
    while not has_come_to(aim, work.states()):
        if work.clock.mono_ns() > end_ns:
            raise DrillError(f"rank {aim.rank} was not at step {aim.at_step} in {limit_s:g} s")
        pause.wait(LOOK_EVERY_S)


def _warn(work: _Drill) -> None:
    if work.owner_uid != work.uid:
        click.echo(
            f"gpuops: WARNING: this run belongs to user {work.owner_uid}, not to you", err=True
        )


def _ask(text: str, *, yes: bool) -> None:
    """Say what will be broken and get consent.

    Raises:
        UsageError: Nobody can be asked.
        DrillError: The answer was no.
    """
    click.echo(text, err=True)
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("nobody is there to confirm it; --yes says that it is meant")
    if not click.confirm("Break it?", err=True):
        raise DrillError("not confirmed; nothing was broken")


def _tell(work: _Drill, done: Sequence[tuple[Fault, Outcome]]) -> int:
    is_well = bool(done) and not any(outcome.not_undone for _fault, outcome in done)
    if work.as_json:
        faults = [
            {**to_json(fault), "failed": list(it.failed), "not_undone": list(it.not_undone)}
            for fault, it in done
        ]
        click.echo(json.dumps(envelope("gpuops.drill/1", {"faults": faults}), indent=2))
    else:
        for fault, outcome in done:
            click.echo(said(fault, outcome))
    return EXIT_OK if is_well else EXIT_FAIL


def _folders(directory: Path) -> list[Path]:
    try:
        return [path for path in directory.iterdir() if path.is_dir()]
    except OSError:
        return []


def _uid_of(owner: str, uid: int) -> int:
    if uid != 0:
        raise UsageError("--owner is for root; others break their own runs")
    try:
        return int(owner) if owner.isdecimal() else pwd.getpwnam(owner).pw_uid
    except KeyError:
        raise UsageError(f"--owner {owner}: no such user") from None
