"""How long a run has between the scheduler's notice and its SIGKILL."""

from collections.abc import Mapping
from signal import Signals

from gpuops.agent.slurm_launch import seconds_left

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
