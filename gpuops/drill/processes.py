"""Fault injectors that act on processes: kill, stop, slow down, freeze, drain."""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event

from gpuops.drill.fault import (
    DrillOptions,
    DrillTarget,
    Fault,
    Pulse,
    format_seconds,
    freeze,
    kill,
    required_rank,
    scenario,
    select_agent,
)
from gpuops.drill.find import (
    RankAtStep,
    StepTrigger,
    find_agent,
    find_control_store,
    find_descendants,
    find_rank_at_step,
    find_worker,
    read_states,
    send,
)
from gpuops.errors import EXIT_FAIL, EXIT_OK, EXIT_USAGE, DrillError, UsageError
from gpuops.host.clock import Clock, SystemClock
from gpuops.host.trust import current_uid
from gpuops.log import printable

POLL_S = 0.005


def kill_at_step(
    trigger: StepTrigger,
    directory: Path,
    deadline_s: float,
    clock: Clock,
    wait: Callable[[float], object],
    uid: int,
) -> RankAtStep | None:
    """Kill the rank once it reaches the step; return it, None if *deadline_s* passed first.

    Only a worker of an agent of user *uid* is killed.

    Raises:
        DrillError: The process that the run named last is not such a worker.
    """
    end_ns, refused = clock.mono_ns() + round(deadline_s * 1e9), None
    while clock.mono_ns() < end_ns:
        target = find_rank_at_step(trigger, read_states(directory))
        if target is not None:
            try:
                victim = find_worker(target.state, trigger.rank, find_agent(target.state, uid))
            except DrillError as exc:
                refused = exc  # it may have ended just now, and the next one is the worker
            else:
                if send(victim, signal.SIGKILL):
                    return target
        wait(POLL_S)
    if refused is not None:
        raise refused
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, wait for the step, kill the rank, print what was done."""
    parser = argparse.ArgumentParser(prog="gpuops.drill.processes", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="a run's folder or its parent")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--at-step", type=int, required=True)
    parser.add_argument("--generation", type=int, default=0)
    parser.add_argument("--deadline", type=float, default=60.0, metavar="SECONDS")
    try:
        args = parser.parse_args(arguments)
    except SystemExit as exc:
        return EXIT_USAGE if exc.code else EXIT_OK
    trigger = StepTrigger(rank=args.rank, at_step=args.at_step, generation=args.generation)
    try:
        target = kill_at_step(
            trigger, args.run_dir, args.deadline, SystemClock(), Event().wait, current_uid()
        )
    except DrillError as exc:
        sys.stderr.write(f"kill_rank: {printable(str(exc))}\n")
        return EXIT_FAIL
    if target is None:
        sys.stderr.write(
            f"kill_rank: rank {trigger.rank} was not at step {trigger.at_step} of generation "
            f"{trigger.generation} below {args.run_dir} within {args.deadline:g} s\n"
        )
        return EXIT_FAIL
    sys.stderr.write(
        f"kill_rank: sent SIGKILL to rank {trigger.rank} (pid {target.pid}) at step {target.step}\n"
    )
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())


# Signals that end processes in practice: crashes, aborts of a watchdog, the OOM killer.
KILL_SIGNALS = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGTERM")


@scenario("kill-rank", "End one rank by a signal (SIGKILL).", "node", "rank", "signal")
def kill_rank(target: DrillTarget, options: DrillOptions) -> Fault:
    """Return the fault: one signal to one rank."""
    rank, name = required_rank(options), options.signal or "SIGKILL"
    if name not in KILL_SIGNALS:
        raise UsageError(f"--signal {name}: a rank is ended by one of {', '.join(KILL_SIGNALS)}")
    state, agent = select_agent(target, options, rank=rank)
    victim = find_worker(state, rank, agent)
    return Fault(
        breaks=f"{victim} on node {state.node} gets {name}.",
        undone="It is not undone: the run restarts its workers, or ends.",
        changes=kill((victim,), name),
    ).about(state, rank)


@scenario("kill-agent", "Kill the agent of a node, not its workers.", "node", "rank")
def kill_agent(target: DrillTarget, options: DrillOptions) -> Fault:
    """Return the fault: SIGKILL to the agent alone."""
    state, agent = select_agent(target, options, rank=options.rank)
    return Fault(
        breaks=f"{agent} gets SIGKILL. Its workers die with it.",
        undone="It is not undone; start `gpuops run` on this node again.",
        changes=kill((agent,)),
    ).about(state)


@scenario("kill-node", "Kill everything of the run on a node at once.", "node", "rank")
def kill_node(target: DrillTarget, options: DrillOptions) -> Fault:
    """Return the fault: SIGKILL to the agent, its descendants, and a control store on this node."""
    state, agent = select_agent(target, options, rank=options.rank)
    victims, stores = [agent, *find_descendants(agent)], ""
    with suppress(DrillError):
        victims.append(find_control_store(state, agent))
        stores = ", including the store of the run"
    return Fault(
        breaks=f"All {len(victims)} processes of {agent} get SIGKILL{stores}.",
        undone="It is not undone; start `gpuops run` on this node again.",
        changes=kill(tuple(victims)),
    ).about(state)


@scenario("stop-rank", "Stop one rank (SIGSTOP); with --for it continues.", "node", "rank", "for_s")
def stop_rank(target: DrillTarget, options: DrillOptions) -> Fault:
    """Return the fault: the rank is stopped, for good without ``--for``."""
    rank = required_rank(options)
    state, agent = select_agent(target, options, rank=rank)
    victim = find_worker(state, rank, agent)
    if options.for_s is None:
        undone = f"It is not undone; `kill -CONT {victim.pid}` continues it."
        changes = kill((victim,), "SIGSTOP")
    else:
        held = format_seconds(options.for_s)
        undone = f"After {held} it continues (SIGCONT), also if this command ends."
        changes = freeze((victim,))
    return Fault(
        breaks=f"{victim} on node {state.node} is stopped (SIGSTOP).",
        undone=undone,
        changes=changes,
        for_s=options.for_s,
    ).about(state, rank)


SLOW_RANK_FOR_S = 60.0
SLOW_RANK_SHARE = 0.5
SLOW_RANK_PERIOD_S = 0.2


@scenario(
    "slow-rank", "Slow one rank down by stopping it periodically.", "node", "rank", "for_s", "share"
)
def slow_rank(target: DrillTarget, options: DrillOptions) -> Fault:
    """Return the fault: the rank runs for only a share of the time."""
    rank, share = (
        required_rank(options),
        SLOW_RANK_SHARE if options.share is None else options.share,
    )
    if not 0 < share < 1:
        raise UsageError(f"--share {share:g}: the share of the time that it is stopped, 0 to 1")
    state, agent = select_agent(target, options, rank=rank)
    victim = find_worker(state, rank, agent)
    for_s = SLOW_RANK_FOR_S if options.for_s is None else options.for_s
    return Fault(
        breaks=f"{victim} on node {state.node} is stopped for {share:.0%} of the time.",
        undone=f"After {format_seconds(for_s)} it runs normally again, also if this command ends.",
        pulse=Pulse((victim,), share * SLOW_RANK_PERIOD_S, (1 - share) * SLOW_RANK_PERIOD_S),
        for_s=for_s,
    ).about(state, rank)


# Above the 15 s after which peers count a silent agent as dead.
FREEZE_NODE_FOR_S = 30.0


@scenario(
    "freeze-node",
    "Stop everything of the run on a node, then continue it.",
    "node",
    "rank",
    "for_s",
    "store",
)
def freeze_node(target: DrillTarget, options: DrillOptions) -> Fault:
    """Return the fault: SIGSTOP to the agent and its descendants.

    The agent stops first, so that it does not see its workers stop. It also continues last (steps
    are undone in reverse): the worst order for workers that must no longer train.
    """
    state, agent = select_agent(target, options, rank=options.rank)
    victims = [agent, *find_descendants(agent)]
    if options.store:
        victims.append(find_control_store(state, agent))
    for_s = FREEZE_NODE_FOR_S if options.for_s is None else options.for_s
    stores = " and the store of the run" if options.store else ""
    return Fault(
        breaks=f"All {len(victims)} processes of {agent}{stores} are stopped (SIGSTOP).",
        undone=f"After {format_seconds(for_s)} they continue (SIGCONT), also if this command ends.",
        changes=freeze(tuple(victims)),
        for_s=for_s,
    ).about(state)


# What `--signal=USR1@120` sends before the end, and what scancel and preemption send.
PREEMPT_SIGNALS = ("SIGUSR1", "SIGTERM")


@scenario("preempt", "Announce the end of the job as Slurm does.", "node", "rank", "signal")
def preempt(target: DrillTarget, options: DrillOptions) -> Fault:
    """Return the fault: SIGUSR1 or SIGTERM to the agent."""
    name = options.signal or PREEMPT_SIGNALS[0]
    if name not in PREEMPT_SIGNALS:
        raise UsageError(
            f"--signal {name}: Slurm announces the end by {' or '.join(PREEMPT_SIGNALS)}"
        )
    state, agent = select_agent(target, options, rank=options.rank)
    return Fault(
        breaks=f"{agent} gets {name}, as from Slurm: the run saves what it can and ends.",
        undone="It is not undone; submit the job again.",
        changes=kill((agent,), name),
    ).about(state)


@scenario("kill-board", "Kill the process that holds the agents' store.", "node", "rank")
def kill_board(target: DrillTarget, options: DrillOptions) -> Fault:
    """Return the fault: SIGKILL to the process of the control store."""
    state, agent = select_agent(target, options, rank=options.rank)
    control_store = find_control_store(state, agent)
    return Fault(
        breaks=f"{control_store} on node {state.node} gets SIGKILL.",
        undone="It is not undone: without it the agents end with exit code 85.",
        changes=kill((control_store,)),
    ).about(state)


SLOW_BOARD_FOR_S = 60.0
SLOW_BOARD_DELAY_MS = 2000.0
# Long enough to answer the queued requests, short compared with the delay.
SLOW_BOARD_RUNNING_S = 0.1


@scenario(
    "slow-board",
    "Make the agents' store answer two seconds late.",
    "node",
    "rank",
    "for_s",
    "delay_ms",
)
def slow_board(target: DrillTarget, options: DrillOptions) -> Fault:
    """Return the fault: the store's process is stopped periodically."""
    delay_ms = SLOW_BOARD_DELAY_MS if options.delay_ms is None else options.delay_ms
    if delay_ms <= 0:
        raise UsageError(f"--delay {delay_ms:g}: more than 0 ms")
    state, agent = select_agent(target, options, rank=options.rank)
    control_store = find_control_store(state, agent)
    for_s = SLOW_BOARD_FOR_S if options.for_s is None else options.for_s
    return Fault(
        breaks=f"{control_store} on node {state.node} answers up to {delay_ms:g} ms late.",
        undone=f"After {format_seconds(for_s)} it runs normally again, also if this command ends.",
        pulse=Pulse((control_store,), delay_ms / 1000, SLOW_BOARD_RUNNING_S),
        for_s=for_s,
    ).about(state)
