"""This node in a sweep: why it takes no part, and what is done about what was found of it."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import click

from gpuops.checks.core.runner import CheckRun
from gpuops.checks.core.silence import apply_silences
from gpuops.config.resolve import environ
from gpuops.errors import EXIT_FAIL, EXIT_OK, BusyError, SlurmError
from gpuops.gate.health_check import FindScontrol, record_and_drain
from gpuops.gate.hook import HookContext
from gpuops.gate.node_lock import node_lock
from gpuops.gate.record import record_check_run
from gpuops.gate.session import check_node
from gpuops.host.gpu_names import read_gpu_names
from gpuops.log import printable
from gpuops.model import Entity, EntityKind, Finding, Status
from gpuops.slurm.topology import domain_of
from gpuops.sweep.messages import Participant

SUITE = "sweep"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptNode:
    """This node, with the gate of its hooks; ``find``: of scontrol, where it has to be drained."""

    context: HookContext
    find: FindScontrol
    is_checked: bool
    is_recorded: bool

    @property
    def name(self) -> str:
        return self.context.gate.node

    @contextmanager
    def locked(self, name: str) -> Iterator[Participant]:
        """Yield this node as the participant *name*, locked, and unfit if it must not be tested.

        The caller must have a single thread.
        """
        with ExitStack() as stack:
            unfit = self._why_unfit(stack)
            domain = domain_of(environ())
            yield Participant(
                node=name,
                address="",
                devices=self._count_gpus(),
                domain=domain[-1] if domain else None,
                unfit=unfit,
            )

    def _why_unfit(self, stack: ExitStack) -> str | None:
        try:
            no_lock = stack.enter_context(node_lock(self.context.gate.state_dir, SUITE))
        except BusyError as exc:
            return str(exc)
        if no_lock is not None:
            warn(f"another test of this node would not be noticed: no lock in {no_lock}")
        if not self.is_checked:
            return None
        found = check_node(self.context.plan, self.context.clock).findings
        failed = (f"{item.check}: {item.headline}" for item in found if item.status is Status.FAIL)
        return next(failed, None)

    def _count_gpus(self) -> int:
        """Return how many GPUs we may use, without asking the driver, which may hang."""
        found = len(read_gpu_names(self.context.plan.request.root, {}))
        visible = environ().get("CUDA_VISIBLE_DEVICES")
        return found if visible is None else min(found, len([w for w in visible.split(",") if w]))

    def settle(self, found: Sequence[Finding], start_us: int) -> int:
        """Show and record what a sweep that began at *start_us* *found* about this node.

        As root it goes through the gate, which may drain the node; a user's sweep makes no strike.
        Returns the exit code. The caller must have a single thread.
        """
        context, now_us = self.context, self.context.clock.now_us()
        node = Entity(EntityKind.NODE, self.name)  # over ssh the sweep may call it otherwise
        findings = apply_silences(
            [replace(item, entity=node) for item in found if item.entity.kind is EntityKind.NODE],
            silences=context.plan.silences,
            node=self.name,
            now_us=now_us,
        )
        for item in findings:
            if item.status is not Status.PASS:
                warn(f"{self.name}: {item.status.word}: {item.message}")
        if self.is_recorded and findings:
            check_run = CheckRun(
                suite=SUITE,
                node=self.name,
                start_us=start_us,
                end_us=now_us,
                findings=tuple(findings),
            )
            for text in self._act(check_run):
                click.echo(printable(text), err=True)
        return EXIT_FAIL if any(item.status is Status.FAIL for item in findings) else EXIT_OK

    def _act(self, check_run: CheckRun) -> list[str]:
        """Return what went wrong, and what was decided about a node that fails."""
        context = self.context
        if context.gate.uid != 0:
            options, clock = context.options, context.clock
            problem = record_check_run(check_run, context.occasion, options, clock)
            return [problem] if problem else []
        try:
            result = record_and_drain(context, check_run, self.find)
        except SlurmError as exc:
            return [f"gpuops: {self.name} is to be drained, and is not yet: {exc}"]
        decided = [f"{result.decision.outcome}: {result.decision.why}"] if result.cause else []
        return [*result.problems, *decided]


def warn(text: str) -> None:
    """Write *text* on standard error."""
    click.echo(f"gpuops: {printable(text)}", err=True)
