"""What a launch was asked to be, once flags, environment and Slurm have been read together."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from gpuops.control.etcd.quorum import SETTLE_S, STALE_S, GatherLimits
from gpuops.incident.decision import RestartPolicy

# However seldom --monitor-interval asks for: a poll costs microseconds, and signals wait for it.
LOOK_S_MAX = 1.0
_SWEEP_SHARE = 0.8  # of the join timeout; the rest is for the health checks and the last call


class EndpointKind(StrEnum):
    """Where the agents of a run meet."""

    PRIVATE = "private"  # one node: a control store in this process, no port
    TCP = "tcp"  # a control store in a process of its own, on the node of the endpoint
    POSTGRES = "postgres"  # a table: any single node may be lost
    ETCD = "etcd"  # keys in an etcd of the site: the same


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointPlan:
    """How to reach the control store. ``is_host`` None: find out if the endpoint is this node."""

    kind: EndpointKind
    run_key: str  # --rdzv-id: agents with the same one are one run
    host: str = ""
    port: int = 0
    url: str = field(default="", repr=False)  # of Postgres or etcd; a secret
    token: str = field(default="", repr=False)  # of the job; a secret
    own_token: Path | None = None  # the file of the user's own token, where none was given
    is_host: bool | None = None

    @property
    def is_insecure(self) -> bool:
        """Return whether anyone may be an agent of this run."""
        return self.kind is not EndpointKind.PRIVATE and not (self.token or self.own_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    """What the run does for the checkpoints of its script.

    ``directory``: where they persist, an absolute path or a URL; None: the script says. The keeper
    of a killed agent waits ``lease_s`` for the next one. Each node's part of a state lies in the
    memory of ``replicas`` nodes, apart by ``domain`` (see `gpuops.agent.checkpoint.start`). A run
    that ends waits ``last_save_s`` at most for its newest
    checkpoint to persist.
    """

    in_memory: bool = True
    directory: str | None = None
    lease_s: float = 120.0
    last_save_s: float = 600.0
    replicas: int = 2
    domain: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """Everything about supervision that is not torch's own configuration.

    ``order`` is this node's requested place (SLURM_PROCID, ``--node-rank``). ``spares`` agents are
    expected beyond ``terms.nodes_max``. ``hang_timeout_s`` None: learned from the job; 0: off.
    ``parks`` under srun: an agent that is not in the roster waits for the run's end and exits with
    its code.
    """

    restart_policy: RestartPolicy
    endpoint: EndpointPlan
    order: int | None = None
    spares: int = 0
    hang_timeout_s: float | None = None
    slow_after_s: float = 60.0  # 0: nobody looks for slow ranks
    join_timeout_s: float = 600.0
    last_call_s: float = 5.0
    first_call_s: float = 30.0  # of the first start, as torchrun's: nodes start at different times
    suspect_s: float = 6.0
    fence_s: float = 10.0
    dead_s: float = 15.0
    store_lost_s: float = 60.0  # without the control store for this long: exit 85
    gate: bool = True
    gate_deadline_s: float = 20.0
    records_steps: bool = False
    preflight: str = "off"  # or quick, sweep: a test under load before the first generation
    preflight_deadline_s: float = 30.0
    grow_after_s: float | None = 300.0  # None: never
    drain_grace_s: float | None = None  # None: from Slurm's deadline, else 25 s
    http_address: str = "127.0.0.1"
    http_port: int | None = 0  # 0: any free one; None: no listener
    parks: bool = False
    quorum: bool | None = None  # several nodes hold the control store; None: where they can
    local_address: str | None = None
    decide: str | None = None  # ``module:function`` of the site, which may overrule a decision
    checkpoints: CheckpointPlan = CheckpointPlan()

    @property
    def preflight_limit_s(self) -> float:
        """Return how long the test before the first generation may take.

        A sweep takes minutes, and its nodes must join before the others give up.
        """
        share_s = _SWEEP_SHARE * self.join_timeout_s
        return share_s if self.preflight == "sweep" else self.preflight_deadline_s

    @property
    def gather_limits(self) -> GatherLimits:
        """Return whom the agents that could hold the control store wait for, and for how long."""
        return GatherLimits(
            nodes_min=self.restart_policy.nodes_min,
            nodes_max=self.restart_policy.nodes_max + self.spares,
            settle_s=min(SETTLE_S, self.first_call_s),
            # A server that was started anew learns of a quorum meanwhile.
            first_call_s=max(self.first_call_s, STALE_S),
            join_timeout_s=self.join_timeout_s,
        )
