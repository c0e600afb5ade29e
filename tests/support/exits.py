"""Ends of workers, built by hand: what an agent would have seen."""

from gpuops.incident.cause import judge_exits
from gpuops.incident.incidents.worker_failure import incident_from_exits
from gpuops.model import WorkerExit
from gpuops.resources import data_dir
from gpuops.rules import load_rules

RUN = "0190f6a0-0000-7000-8000-0000abcd1234"
NODE = "n041"
S = 1_000_000_000
RULES = load_rules([data_dir("checks") / "rules"])
PEER_CLOSED = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:3504: "
    "Connection reset by peer"
)
WATCHDOG = (
    "[rank{rank}]:[E302 09:14:08 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, Timeout(ms)=600000) "
    "ran for 600060 milliseconds before timing out."
)


def worker(rank, at_s=100.0, **changes):
    """Return the exit of *rank*, noticed at *at_s* on the monotonic clock; code 1 unless told."""
    fields = {
        "node": NODE,
        "rank": rank,
        "local_rank": rank,
        "pid": 4000 + rank,
        "exit_code": 1,
        "signal": None,
        "terminated": False,
        "seen_us": 1_700_000_000_000_000 + round(at_s * 1e6),
        "seen_mono_ns": round(at_s * S),
        "last_step": 57,
        "beats": 57,
        "log_tail": (f"[rank {rank}] step 56 loss 3.21", f"[rank {rank}] step 57 loss 3.20"),
        "log_path": f"/runs/demo/generation-0/rank{rank}/stderr.log",
    }
    return WorkerExit(**{**fields, **changes})


def killed(rank, at_s=100.0, signal="SIGKILL", **changes):
    return worker(rank, at_s, exit_code=None, signal=signal, **changes)


def terminated(rank, at_s=100.2, **changes):
    return killed(rank, at_s, signal="SIGTERM", **{"terminated": True, **changes})


def finished(rank, at_s=100.0, **changes):
    return worker(rank, at_s, exit_code=0, **changes)


def raised(rank, what="ValueError: bad batch", at_s=100.0, place="train.py", line=88, **changes):
    """Return a worker that raised *what* at *at_s* and was noticed a tenth of a second later."""
    kind, _, message = what.partition(": ")
    traceback = (
        "Traceback (most recent call last):",
        f'  File "/home/ada/{place}", line {line}, in main',
        "    loss = step(batch)",
        f"{kind}: {message}",
    )
    return worker(
        rank,
        at_s + 0.1,
        **{
            "exception_type": kind,
            "exception_message": message,
            "traceback": traceback,
            "error_mono_ns": round(at_s * S),
            **changes,
        },
    )


def incident_of(*exits, kernel_lines=(), detected_s=100.5, rules=RULES, attempt=0):
    return incident_from_exits(
        judge_exits(exits, rules, kernel_lines),
        run_id=RUN,
        attempt=attempt,
        node=NODE,
        detected_us=1_700_000_000_000_000 + round(detected_s * 1e6),
        detected_mono_ns=round(detected_s * S),
    )


def culprits(incident):
    return [str(entity) for entity in incident.culprits]
