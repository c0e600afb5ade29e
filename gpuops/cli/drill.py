"""``gpuops drill``: its options and what it prints."""

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

from gpuops.cli.options import json_option, option_callback, settings_of
from gpuops.config.resolve import Settings, environ
from gpuops.config.schema import to_size
from gpuops.drill.catalogue import (
    BY_NAME,
    HOLD_RANGE_S,
    RANDOM_DEFAULT,
    SCENARIOS,
    draw_fault,
    needs_run,
)
from gpuops.drill.fault import DrillOptions, DrillTarget, Fault, InjectionResult, Scenario
from gpuops.drill.find import (
    AgentStateFile,
    StepTrigger,
    find_rank_at_step,
    read_states,
    run_folders,
)
from gpuops.drill.inject import inject
from gpuops.drill.processes import POLL_S
from gpuops.drill.undo import ended_event, fault_to_json, injected_event
from gpuops.errors import EXIT_FAIL, EXIT_OK, DrillError, UsageError
from gpuops.host.clock import SystemClock
from gpuops.host.node_state import boot_id, node_name
from gpuops.host.trust import current_uid
from gpuops.log import printable
from gpuops.model import envelope
from gpuops.store.spool.record import Recorder, spool_recorder
from gpuops.wire.worker_drill import KINDS, VARIABLE

OptionDecorator = Callable[[Callable[..., Any]], Callable[..., Any]]


FLAGS: dict[str, OptionDecorator] = {
    "node": click.option("--node", metavar="NAME", help="The agent of this node."),
    "rank": click.option("--rank", type=click.IntRange(min=0), help="This rank, or its agent."),
    "for_s": click.option("--for", "for_s", type=click.FloatRange(0.1, 86400), metavar="SECONDS"),
    "signal": click.option("--signal", metavar="NAME", help="Another signal, like SIGSEGV."),
    "store": click.option("--store-too", "store", is_flag=True, help="The agents' store as well."),
    "interface": click.option("--interface", metavar="NAME", help="This network interface."),
    "peers": click.option("--peer", "peers", multiple=True, metavar="ADDRESS"),
    "delay_ms": click.option("--delay", "delay_ms", type=float, metavar="MS"),
    "loss_percent": click.option("--loss", "loss_percent", type=float, metavar="PERCENT"),
    "rate_mbit": click.option("--rate", "rate_mbit", type=float, metavar="MBIT"),
    "directory": click.option("--dir", "directory", metavar="DIR", help="On this file system."),
    "size_bytes": click.option(
        "--size", "size_bytes", callback=option_callback(to_size), help="How much to take (1GiB)."
    ),
    "leave_bytes": click.option(
        "--leave", "leave_bytes", callback=option_callback(to_size), help="How much to leave."
    ),
    "address": click.option("--address", metavar="PCI", help="The GPU, like 0000:3b:00."),
    "xid": click.option("--xid", type=int, help="Another Xid."),
    "count": click.option("--count", type=int, help="The number of lines."),
    "share": click.option("--share", type=float, help="The share of the time that it is stopped."),
}
RUN_FLAGS: tuple[OptionDecorator, ...] = (
    click.option(
        "--run-dir",
        type=click.Path(path_type=Path),
        help="The run's folder, or where runs go; default: the setting run.dir.",
    ),
    click.option("--pid", type=click.IntRange(min=2), help="The run of this agent or worker."),
    click.option("--owner", metavar="USER", help="As root: break a run of this user."),
)
STEP_FLAGS: tuple[OptionDecorator, ...] = (
    click.option(
        "--at-step", type=click.IntRange(min=0), help="Wait until the rank is at this step."
    ),
    click.option("--generation", type=click.IntRange(min=0), help="... in this generation."),
    click.option("--deadline", type=float, default=600.0, show_default=True, metavar="SECONDS"),
)
yes_option = click.option("--yes", is_flag=True, help="Do not ask.")


def scenario_list(scenarios: Sequence[Scenario]) -> str:
    """Return one line for each scenario."""
    width = max(len(item.name) for item in scenarios)
    return "\n".join(f"{item.name:{width}}  {item.summary}" for item in scenarios)


def fault_text(fault: Fault) -> str:
    """Return what *fault* breaks and how it is undone."""
    return printable(f"{fault.scenario}: {fault.breaks}\n{fault.undone}")


def outcome_text(fault: Fault, outcome: InjectionResult) -> str:
    """Return the result of *fault*."""
    held = "" if fault.for_s is None else f", held {fault.for_s:g} s and undone"
    if outcome.not_undone:
        held = ", NOT UNDONE: " + "; ".join(outcome.not_undone)
    lines = [f"{fault.scenario}: injected{held}"]
    lines += [f"  failed step: {problem}" for problem in outcome.failed]
    return printable("\n".join(lines))


SEED_MAX = 2**31


class _DrillSession:
    """The settings, clock and run of one command line."""

    def __init__(self, ctx: click.Context, options: dict[str, object], *, as_json: bool) -> None:
        self.settings: Settings = settings_of(ctx)
        self.clock = SystemClock()
        self.uid = current_uid()
        self.node = node_name(environ())
        self.as_json = as_json
        self._options = options
        owner = options.get("owner")
        self.owner_uid = self.uid if owner is None else _uid_of(str(owner), self.uid)

    def states(self) -> list[AgentStateFile]:
        """Return the current state files of the selected run."""
        named, pid = self._options.get("run_dir"), self._options.get("pid")
        directory = named if isinstance(named, Path) else self.settings.run_dir
        if pid is None:
            return read_states(directory)
        for folder in (directory, *run_folders(directory)):
            states = read_states(folder)
            if any(pid in {state.agent_pid, *state.pids.values()} for state in states):
                return states
        raise DrillError(f"no run below {directory} has an agent or a worker with pid {pid}")

    def target(self) -> DrillTarget:
        """Return the target of the faults."""
        return DrillTarget(states=self.states(), uid=self.owner_uid, root=self.settings.root)

    def inject(self, fault: Fault) -> InjectionResult:
        """Record *fault*, inject it, record the result."""
        recorder = self._recorder(fault)
        try:
            context = {"node": self.node, "clock": self.clock, "randomness": os.urandom}
            recorder.record(injected_event(fault, uid=self.uid, **context))  # type: ignore[arg-type]
            outcome = InjectionResult(failed=("it was not injected",))
            try:
                outcome = inject(fault, self.clock, Pause().wait)
            finally:
                recorder.record(ended_event(fault, outcome, **context))  # type: ignore[arg-type]
        finally:
            recorder.close()
        return outcome

    def _recorder(self, fault: Fault) -> Recorder:
        # Never into another user's folder: root would follow their links.
        run_folders = (
            [s.folder for s in self._states_or_none() if s.run_id == fault.run_id]
            if fault.run_id
            else []
        )
        return spool_recorder(
            self.settings.spool_dir,
            node=self.node,
            boot_id=boot_id(self.settings.root),
            bytes_max=self.settings.spool_bytes_max,
            clock=self.clock,
            journal=run_folders[0] / "journal"
            if run_folders and self.owner_uid == self.uid
            else None,
        )

    def _states_or_none(self) -> list[AgentStateFile]:
        try:
            return self.states()
        except DrillError:
            return []


@click.group(epilog="Example: gpuops drill kill-rank --rank 1 --at-step 100 --run-dir gpuops-runs")
def drill() -> None:
    """Inject a fault on this machine, to test that the run recovers.

    Every scenario first shows what it will break, for how long, and how that is undone.
    """


@drill.command("list", epilog="Example: gpuops drill list")
@json_option
def list_scenarios(*, as_json: bool) -> None:
    """List the scenarios, and the faults that a worker injects into itself."""
    if as_json:
        rows = [{"name": item.name, "summary": item.summary} for item in SCENARIOS]
        of_worker = [{"name": name, "summary": KINDS[name]} for name in KINDS]
        body = {"scenarios": rows, "worker_faults": of_worker}
        click.echo(json.dumps(envelope("gpuops.drill-list/1", body), indent=2))
        return
    width = max(map(len, KINDS))
    click.echo(scenario_list(SCENARIOS))
    click.echo(
        f"\nFaults inside a worker, with {VARIABLE}=KIND:rank=N,step=N gpuops run --allow-drills:"
    )
    click.echo("\n".join(f"{name:{width}}  {summary}" for name, summary in KINDS.items()))


# For the help of a scenario: the first two of these options that it has.
_EXAMPLES = {
    "rank": "--rank 1",
    "interface": "--interface eth0",
    "dir": "--dir /scratch",
    "leave": "--leave 1GiB",
    "address": "--address 0000:3b:00.0",
    "for_s": "--for 30",
}


def _example_words(scenario: Scenario) -> list[str]:
    words = [text for name, text in _EXAMPLES.items() if name in scenario.options][:2]
    return [*words, "--run-dir gpuops-runs"] if needs_run(scenario) else words


def _command(scenario: Scenario) -> click.Command:
    """Return the command of one scenario: its own options and the common ones."""
    of_run = needs_run(scenario)

    def call(ctx: click.Context, /, **options: Any) -> int:  # noqa: ANN401 as click has them
        mine = {name: options[name] for name in scenario.options}
        work = _DrillSession(ctx, options, as_json=bool(options["as_json"]))
        if of_run and options["at_step"] is not None:
            _wait_for_step(work, options)
        target = work.target() if of_run else DrillTarget(uid=work.uid, root=work.settings.root)
        fault = scenario.plan(target, DrillOptions(**mine))
        _warn_foreign_run(work)
        _confirm(fault_text(fault), yes=bool(options["yes"]))
        return _print_outcomes(work, [(fault, work.inject(fault))])

    command: Callable[..., Any] = click.pass_context(call)
    flags = [FLAGS[name] for name in scenario.options]
    flags += [*RUN_FLAGS, *(STEP_FLAGS if "rank" in scenario.options else ())] if of_run else []
    for flag in reversed([*flags, yes_option, json_option]):
        command = flag(command)
    example = f"Example: gpuops drill {' '.join((scenario.name, *_example_words(scenario)))}"
    return click.command(scenario.name, help=scenario.summary, epilog=example)(command)


for _scenario in SCENARIOS:
    drill.add_command(_command(_scenario))


@drill.command("random", epilog="Example: gpuops drill random --seed 7 --run-dir gpuops-runs")
@click.option(
    "--seed", type=click.IntRange(0, SEED_MAX), required=True, help="The seed of the random faults."
)
@click.option("--faults", type=click.IntRange(1, 10_000), default=10, show_default=True)
@click.option("--every", "every_s", type=click.FloatRange(0, 86400), default=30, show_default=True)
@click.option(
    "--scenario",
    "names",
    multiple=True,
    type=click.Choice(sorted(HOLD_RANGE_S)),
    default=RANDOM_DEFAULT,
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
    """Inject random faults from a seed, one after the other."""
    session = _DrillSession(ctx, of_run, as_json=as_json)
    _warn_foreign_run(session)
    _confirm(
        f"{faults} faults, one every {every_s:g} s, seed {seed}, out of: {', '.join(names)}.\n"
        "Each is shown before it is injected.",
        yes=yes,
    )
    rng, done, pause = Random(seed), [], Pause()  # noqa: S311 to be repeated, not a secret
    for _ in range(faults):
        end_ns = session.clock.mono_ns() + round(every_s * 1e9)
        try:
            target = session.target()
            name, options = draw_fault(rng, names, target.states)
            fault = replace(BY_NAME[name].plan(target, options), seed=seed)
            click.echo(fault_text(fault), err=True)
            done.append((fault, session.inject(fault)))
        except DrillError as exc:
            # The run may be between two generations: the next draw finds it elsewhere.
            click.echo(f"gpuops: {printable(str(exc))}", err=True)
        pause.wait(max(0.0, (end_ns - session.clock.mono_ns()) / 1e9))
    return _print_outcomes(session, done)


def _wait_for_step(session: _DrillSession, options: dict[str, object]) -> None:
    rank = options.get("rank")
    if rank is None:
        raise UsageError("--at-step needs --rank")
    generation = options["generation"]
    trigger = StepTrigger(
        rank=int(str(rank)),
        at_step=int(str(options["at_step"])),
        generation=None if generation is None else int(str(generation)),
    )
    timeout_s, pause = float(str(options["deadline"])), Pause()
    end_ns = session.clock.mono_ns() + round(timeout_s * 1e9)
    while find_rank_at_step(trigger, session.states()) is None:
        if session.clock.mono_ns() > end_ns:
            raise DrillError(
                f"rank {trigger.rank} was not at step {trigger.at_step} in {timeout_s:g} s"
            )
        pause.wait(POLL_S)


def _warn_foreign_run(session: _DrillSession) -> None:
    if session.owner_uid != session.uid:
        click.echo(
            f"gpuops: WARNING: this run belongs to user {session.owner_uid}, not to you", err=True
        )


def _confirm(text: str, *, yes: bool) -> None:
    """Show what will be broken and ask for consent.

    Raises:
        UsageError: Standard input is not a terminal.
        DrillError: The answer was no.
    """
    click.echo(text, err=True)
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("not a terminal, so it cannot be confirmed; add --yes")
    if not click.confirm("Break it?", err=True):
        raise DrillError("not confirmed; nothing was broken")


def _print_outcomes(session: _DrillSession, done: Sequence[tuple[Fault, InjectionResult]]) -> int:
    succeeded = bool(done) and not any(outcome.not_undone for _fault, outcome in done)
    if session.as_json:
        faults = [
            {**fault_to_json(fault), "failed": list(it.failed), "not_undone": list(it.not_undone)}
            for fault, it in done
        ]
        click.echo(json.dumps(envelope("gpuops.drill/1", {"faults": faults}), indent=2))
    else:
        for fault, outcome in done:
            click.echo(outcome_text(fault, outcome))
    return EXIT_OK if succeeded else EXIT_FAIL


def _uid_of(owner: str, uid: int) -> int:
    if uid != 0:
        raise UsageError("--owner is for root; others break their own runs")
    try:
        return int(owner) if owner.isdecimal() else pwd.getpwnam(owner).pw_uid
    except KeyError:
        raise UsageError(f"--owner {owner}: no such user") from None
