"""What an agent knows of its run, built by hand."""

from gpuops.agent.status.state import AgentState, CheckpointState, RankStatus

RUN = "0190f6a0-0000-7000-8000-0000abcd1234"
FOLDER = "20260101T000000Z-train-abcd1234"


def agent_state(**changes):
    """Return the state of an agent on n1 with two ranks that train, after one restart of three."""
    fields = {
        "run_id": RUN,
        "name": FOLDER,
        "node": "n1",
        "agent_pid": 7,
        "main_ns": 0,
        "control_ns": 0,
        "generation": 1,
        "phase": "run",
        "group_rank": 0,
        "world_size": 2,
        "ranks": (RankStatus(rank=0, pid=5, step=41), RankStatus(rank=1, pid=6, step=40)),
        "restarts_used": 1,
        "restarts_max": 3,
        "board": {"kind": "private"},
    }
    return AgentState(**{**fields, **changes})


def kept(**changes):
    """Return what its keeper holds: step 57 in memory."""
    fields = {"step": 57, "epoch": 1, "since_ns": 0, "tier": "memory"}
    return CheckpointState(**{**fields, **changes})
