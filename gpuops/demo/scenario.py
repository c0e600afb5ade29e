"""The steps of ``gpuops demo``: the commands that a user would type, one after the other.

Every step is a real ``gpuops`` command line in its own process, printed before it runs. Store and
spool are in the demo's folder: the user's are neither read nor written.
"""

import random
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuops.host.process.command import module_command

WORLD_SIZE = 2
INJECTOR_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """Which rank dies, and when: drawn from the seed, so that a demo can be repeated."""

    seed: int
    steps: int
    victim_rank: int
    kill_at_step: int


def make_plan(seed: int, steps: int) -> DemoPlan:
    """Return the plan for *seed*: a kill in the middle third of *steps*."""
    draw = random.Random(seed)  # noqa: S311 a repeatable demo, not a secret
    return DemoPlan(
        seed, steps, draw.randrange(WORLD_SIZE), draw.randint(steps // 3, 2 * steps // 3)
    )


def demo_environment(env: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the environment of the demo's commands: its own store, spool and run directory."""
    inherited = {key: value for key, value in env.items() if not key.startswith("GPUOPS_")}
    return {
        **inherited,
        "GPUOPS_STORE": f"sqlite:///{folder / 'gpuops.db'}",
        "GPUOPS_SPOOL": str(folder / "spool"),
        "GPUOPS_STATE": str(folder / "state"),
        "GPUOPS_RUN_DIR": str(folder / "runs"),
        # The ranks, too, import nothing from the folder in which the demo is started.
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": inherited.get("OMP_NUM_THREADS", "1"),
    }


def run_demo(
    plan: DemoPlan, folder: Path, env: Mapping[str, str], print_line: Callable[[str], None]
) -> int:
    """Run the demo; return the training job's exit code, or that of the injector or the report.

    Raises:
        OSError: *folder* cannot be created.
    """
    folder.mkdir(parents=True, exist_ok=True)
    child_env = demo_environment(env, folder)

    print_line("1. Is this machine fit to train?")
    _gpuops(["check"], child_env, print_line)

    print_line(
        f"2. Train a small transformer on two ranks; rank {plan.victim_rank} gets SIGKILL at step "
        f"{plan.kill_at_step} (seed {plan.seed}). A separate process holds its state in memory: "
        "it resumes from there."
    )
    injector = _start_injector(plan, folder / "runs", child_env)
    command = ["run", "--standalone", f"--nproc-per-node={WORLD_SIZE}", "-m", "gpuops.demo.train"]
    try:
        exit_code = _gpuops(
            [*command, f"--steps={plan.steps}", f"--seed={plan.seed}"], child_env, print_line
        )
    finally:
        injector_code = _stop_injector(injector)
    if injector_code != 0:
        print_line(
            f"The injector killed nothing (exit {injector_code}), so there is no incident to show."
        )

    print_line("3. What happened, what did it cost, who was to blame?")
    report_code = _gpuops(["report"], child_env, print_line)

    print_line(f"Everything is in {folder}. To explore it, with the demo's store:")
    for line in (
        f"export GPUOPS_STORE={child_env['GPUOPS_STORE']} GPUOPS_SPOOL={child_env['GPUOPS_SPOOL']}",
        "gpuops incident ls",
        "gpuops report --json",
        "gpuops runbook --list",
    ):
        print_line(f"  {line}")
    return exit_code or injector_code or report_code


def _gpuops(args: list[str], env: Mapping[str, str], print_line: Callable[[str], None]) -> int:
    print_line(f"$ gpuops {' '.join(args)}")
    return subprocess.run(module_command("gpuops", *args), env=env, check=False).returncode


def _start_injector(
    plan: DemoPlan, runs: Path, env: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    argv = [*module_command("gpuops.drill.processes"), "--run-dir", str(runs)]
    argv += ["--rank", str(plan.victim_rank), "--at-step", str(plan.kill_at_step)]
    argv += ["--deadline", str(INJECTOR_TIMEOUT_S)]
    return subprocess.Popen(argv, env=env)


def _stop_injector(injector: "subprocess.Popen[bytes]") -> int:
    """Stop the injector, which has nothing to kill once the job has ended."""
    try:
        return injector.wait(timeout=5)
    except subprocess.TimeoutExpired:
        injector.kill()
        return injector.wait(timeout=5)
