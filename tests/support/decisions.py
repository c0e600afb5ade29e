"""Reports of nodes and decisions over them, built by hand."""

from gpuops.incident.decision import (
    ClusterState,
    NodeReport,
    PastFailure,
    RankEnd,
    ReportKind,
    RestartDecision,
    RestartPolicy,
    RunAction,
)
from gpuops.model import Confidence, Entity, EntityKind, FailureClass, Role, Side

KILLED = FailureClass.SIGKILL_PROBABLE


def rank_end(rank=1, **changes):
    fields = {
        "rank": rank,
        "local_rank": rank,
        "role": Role.ROOT,
        "failure_class": KILLED,
        "side": Side.AMBIGUOUS,
        "signal": "SIGKILL",
        "step": 57,
        "summary": f"rank {rank} was ended by SIGKILL",
        "log_path": f"/runs/demo/rank{rank}.log",
    }
    return RankEnd(**{**fields, **changes})


def report(node="n1", kind=ReportKind.WORKERS_FAILED, generation=0, **changes):
    """Return what *node* says: that its rank 1 was killed, unless told otherwise."""
    failed = kind is ReportKind.WORKERS_FAILED
    fields = {
        "kind": kind,
        "node": node,
        "generation": generation,
        "failure_class": KILLED if failed else FailureClass.UNRESOLVED,
        "side": Side.AMBIGUOUS,
        "confidence": Confidence.PROBABLE if failed else Confidence.UNKNOWN,
        "how": "the only worker that failed by itself" if failed else "",
        "culprits": (Entity(EntityKind.RANK, "1"),) if failed else (),
        "ends": (rank_end(),) if failed else (),
    }
    return NodeReport(**{**fields, **changes})


def stopped(node="n2", generation=0, **changes):
    return report(node, ReportKind.STOPPED, generation, **changes)


def failure(generation=0, at_s=100.0, **changes):
    fields = {
        "generation": generation,
        "at_s": at_s,
        "failure_class": KILLED,
        "side": Side.AMBIGUOUS,
        "is_counted": True,
    }
    return PastFailure(**{**fields, **changes})


def decision(cause=None, verdict=RunAction.RESTART, generation=0, **changes):
    fields = {
        "action": verdict,
        "rule": "worker-failed",
        "reason": "a worker failed and the budget is not spent",
        "failure": failure(generation),
        "cause": cause,
    }
    return RestartDecision(**{**fields, **changes})


def cluster(*nodes, generation=0, terms=None, **changes):
    names = nodes or ("n1", "n2")
    fields = {
        "policy": terms or RestartPolicy(nodes_max=len(names)),
        "generation": generation,
        "members": names,
        "live": names,
    }
    return ClusterState(**{**fields, **changes})
