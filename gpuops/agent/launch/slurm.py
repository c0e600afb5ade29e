"""What Slurm's environment says of a launch: nodes, their order, time left.

Source: srun(1), "OUTPUT ENVIRONMENT VARIABLES", and what Slurm 22.05 sets. A batch script has
SLURM_PROCID=0 as well; only what `srun` starts has SLURM_STEP_ID.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from signal import Signals

from gpuops.errors import UsageError
from gpuops.hostlist import expand

# Below the kernel's ephemeral ports (32768), above what services are given.
PORT_FIRST, PORTS = 20_000, 10_000
_PRIME = 7919  # two steps of one job, and two jobs in a row, do not fall on one port


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmStep:
    """The step that this agent is a task of. ``gpus``: of this node, None where Slurm has none."""

    job_id: int
    step_id: int
    restarts: int
    nodes: tuple[str, ...]
    order: int
    gpus: int | None = None

    @property
    def host(self) -> str:
        """Return the node where the agents of this step meet."""
        return self.nodes[0]

    @property
    def port(self) -> int:
        """Return the port there, the same on every node without asking."""
        return PORT_FIRST + (self.job_id * _PRIME + self.step_id) % PORTS

    @property
    def run_key(self) -> str:
        """Return what no other run has: a requeued job is a new one."""
        return f"slurm-{self.job_id}.{self.step_id}.{self.restarts}"


def step_of(env: Mapping[str, str]) -> SlurmStep | None:
    """Return the step of `srun` that *env* describes, None outside of one.

    Raises:
        UsageError: Slurm started more than one agent on a node.
    """
    job, step, rank = (_number(env, f"SLURM_{key}") for key in ("JOB_ID", "STEP_ID", "PROCID"))
    nodes = _nodes(env)
    if job is None or step is None or rank is None or not nodes:
        return None
    _refuse_two_on_a_node(env, len(nodes))
    return SlurmStep(
        job_id=job,
        step_id=step,
        restarts=_number(env, "SLURM_RESTART_COUNT") or 0,
        nodes=nodes,
        order=rank,
        gpus=_gpus(env),
    )


def refuse_batch_script(env: Mapping[str, str], step: SlurmStep | None) -> None:
    """Refuse a launch that would train on the first of several nodes and idle on the others.

    Raises:
        UsageError: See above; it says what to write.
    """
    several = _number(env, "SLURM_JOB_NUM_NODES") or _number(env, "SLURM_NNODES") or 1
    if step is None and env.get("SLURM_JOB_ID") and several > 1:
        raise UsageError(
            f"this is one process of a Slurm job with {several} nodes; the others would idle; "
            "write `srun --ntasks-per-node=1 gpuops run …`, or say --nnodes=1"
        )


def seconds_left(env: Mapping[str, str], now_s: float) -> float | None:
    """Return the seconds until the job's time limit; None where Slurm (before 23.02) is silent."""
    end = _number(env, "SLURM_JOB_END_TIME")
    return None if end is None else max(0.0, end - now_s)


def _nodes(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the step's nodes; none where they are of another job, left over in the environment."""
    try:
        names = expand(env.get("SLURM_STEP_NODELIST", ""))
    except ValueError:
        return ()
    here = env.get("SLURMD_NODENAME")
    return names if here is None or here in names else ()


def _refuse_two_on_a_node(env: Mapping[str, str], n_nodes: int) -> None:
    tasks = _number(env, "SLURM_STEP_NUM_TASKS")
    if tasks is not None and tasks > n_nodes:
        raise UsageError(
            f"srun started {tasks} tasks on {n_nodes} node{'s' * (n_nodes > 1)}: one agent a node "
            "is wanted, which starts the workers itself; write `srun --ntasks-per-node=1 gpuops "
            "run --nproc-per-node=N …`"
        )


def _gpus(env: Mapping[str, str]) -> int | None:
    """Return how many GPUs this task may use on its node."""
    on_node = _number(env, "SLURM_GPUS_ON_NODE")
    if not on_node:
        return None
    visible = [part for part in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    return min(on_node, len(visible)) if visible else on_node


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None


# KillWait of slurm.conf(5) is 30 s by default; Kubernetes' terminationGracePeriodSeconds too.
KILL_WAIT_S = 30.0
MARGIN_S = 5.0  # for the records and the exit itself
# What `--signal=USR1@120` leaves, with time to end the workers that did not end by themselves.
NOTICE_S = 90.0
# A time limit farther away than this is not why the signal came: a preemption is (GraceTime of the
# partition, which no job can read), or somebody's scancel.
FAR_S = 900.0


def drain_grace(
    env: Mapping[str, str], now_s: float, signal: Signals, flag_s: float | None = None
) -> float:
    """Return the seconds in which workers may finish their step after *signal*.

    Args:
        env: The agent's environment, Slurm's among it.
        now_s: Seconds since the epoch, as Slurm counts.
        signal: SIGTERM is followed by SIGKILL after KillWait; SIGUSR1 is a notice.
        flag_s: ``--drain-grace``; the time limit still bounds it.
    """
    if signal is not Signals.SIGUSR1:
        return KILL_WAIT_S - MARGIN_S if flag_s is None else flag_s
    left_s = seconds_left(env, now_s)
    if left_s is None:
        return NOTICE_S if flag_s is None else flag_s
    bound_s = max(1.0, left_s - MARGIN_S)
    if flag_s is not None:
        return min(flag_s, bound_s)
    return bound_s if left_s <= FAR_S else NOTICE_S
