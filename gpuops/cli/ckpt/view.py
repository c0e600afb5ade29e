"""The output of ``gpuops ckpt ls`` and ``show``."""

from collections.abc import Mapping, Sequence

from gpuops.checkpoint.storage.api import CheckpointStore, StoredState, StoreScan
from gpuops.checkpoint.storage.inspection import (
    ChosenInterval,
    FileProblem,
    StoredTensor,
    verify_state,
)
from gpuops.cli.ckpt.address import missing_reason
from gpuops.host.clock import SystemClock
from gpuops.log import printable
from gpuops.model import Json
from gpuops.report.render.layout import table
from gpuops.units import US_PER_S, format_bytes, format_seconds

LIST_COLUMNS = ("step", "epoch", "age", "world", "size", "files", "pinned", "name")
WIDTH_UNLIMITED = 10_000  # names are not truncated, so that they can be copied
TENSORS_SHOWN = 40
SIZES_ONLY = (
    "sizes ok: every file exists with its size; verified: it was also read back;\n"
    "`gpuops ckpt verify` checks the content now"
)
SHARDS_SHOWN = 16


def _stored_json(store: CheckpointStore, stored: StoredState) -> Json:
    manifest = stored.manifest
    problems = verify_state(store, stored.state, sizes_only=True)
    return {
        "name": stored.state.name,
        "step": stored.state.step,
        "epoch": stored.state.epoch,
        "created": manifest.created,
        "world": manifest.world,
        "size_bytes": manifest.nbytes,
        "pins": list(stored.tags),
        "complete": not problems,
        "verified": stored.is_verified and not problems,
        "problems": [str(problem) for problem in problems],
        "job": manifest.job,
        "generation": manifest.generation,
        "written_by": manifest.version,
    }


def listing_json(store: CheckpointStore, survey: StoreScan) -> Json:
    """Return the content of *store*; ``complete``: all files exist with the right size."""
    return {
        "address": store.address,
        "checkpoints": [_stored_json(store, stored) for stored in survey.states],
        "damaged": [{"name": item.name, "why": item.why} for item in survey.damaged],
        "leftovers": list(survey.leftovers),
    }


def listing_text(store: CheckpointStore, survey: StoreScan) -> str:
    """Return the same as text."""
    lines = []
    if survey.states:
        found = [
            (stored, verify_state(store, stored.state, sizes_only=True)) for stored in survey.states
        ]
        rows = [_row(stored, is_complete=not problems) for stored, problems in found]
        lines.append(table(LIST_COLUMNS, rows, right=(0, 1, 3), width=WIDTH_UNLIMITED))
        bad = [(stored.state.name, problems) for stored, problems in found if problems]
        lines += [f"DAMAGED: {name}: {_summary(problems)}" for name, problems in bad]
        lines += [SIZES_ONLY] if len(bad) < len(found) else []
    else:
        lines.append(f"no states in {store.address}{missing_reason(store)}")
    lines += [
        f"{item.condition.removeprefix('is ')}: {item.name}: {item.why}" for item in survey.damaged
    ]
    if survey.leftovers:
        lines.append(f"{len(survey.leftovers)} leftovers of writers that did not finish")
    return printable("\n".join(lines))


def _summary(problems: Sequence[FileProblem]) -> str:
    rest = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
    return f"{problems[0]}{rest}"


def _row(stored: StoredState, *, is_complete: bool) -> tuple[str, ...]:
    manifest = stored.manifest
    return (
        str(stored.state.step),
        str(stored.state.epoch),
        _age(manifest.created_s),
        str(manifest.world),
        format_bytes(manifest.nbytes),
        _files_word(stored, is_complete=is_complete),
        ", ".join(stored.tags) or "-",
        stored.state.name,
    )


def _files_word(stored: StoredState, *, is_complete: bool) -> str:
    if not is_complete:
        return "DAMAGED"
    return "verified" if stored.is_verified else "sizes ok"


def _age(created_s: int) -> str:
    return format_seconds(max(SystemClock().now_us() / US_PER_S - created_s, 0.0))


def state_json(
    store: CheckpointStore,
    stored: StoredState,
    tensors: Mapping[str, StoredTensor],
    chosen: ChosenInterval | None,
) -> Json:
    """Return what is known of a state without reading its data."""
    return {
        "address": store.address,
        "checkpoint": _stored_json(store, stored),
        "interval": None if chosen is None else _chosen_json(chosen),
        "shards": [
            {
                "file": record.shard.file_name,
                "rank": record.shard.rank,
                "size_bytes": record.digest.nbytes,
                "layout": record.layout_hash,
                "root": record.digest.root,
            }
            for record in stored.manifest.shards
        ],
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "size_bytes": tensor.nbytes,
                "sharding": tensor.sharding,
                "copies": tensor.n_copies,
                "parts": [
                    {
                        "rank": part.shard.rank,
                        "offsets": list(part.region[0]),
                        "shape": list(part.region[1]),
                    }
                    for part in tensor.parts
                ],
            }
            for tensor in tensors.values()
        ],
    }


def state_text(
    store: CheckpointStore,
    stored: StoredState,
    tensors: Mapping[str, StoredTensor],
    chosen: ChosenInterval | None,
    *,
    all_tensors: bool,
) -> str:
    """Return the same as text, long lists truncated."""
    manifest = stored.manifest
    n_bytes = sum(tensor.nbytes for tensor in tensors.values())
    wrote = f"gpuops {manifest.version}, job {manifest.job or '-'}"
    lines = [
        f"{stored.state} in {store.address}",
        f"saved    {manifest.created}, {_age(manifest.created_s)} ago",
        f"by       {wrote}, attempt {manifest.generation}",
        f"pinned   {', '.join(stored.tags) or 'no'}",
        f"size     {format_bytes(manifest.nbytes)} in {manifest.world} shards",
        f"tensors  {len(tensors)}, {format_bytes(n_bytes)}; what ranks hold alike counts once",
        *(() if chosen is None else _chosen_text(chosen)),
        "",
    ]
    records = manifest.shards[: None if all_tensors else SHARDS_SHOWN]
    shards = [
        (str(r.shard.rank), format_bytes(r.digest.nbytes), r.layout_hash[:16], r.digest.root[:16])
        for r in records
    ]
    lines.append(table(("shard", "size", "layout", "root"), shards, right=(0,)))
    lines += [*_omitted(len(manifest.shards) - len(records), "shards"), ""]
    shown = list(tensors.values())[: None if all_tensors else TENSORS_SHOWN]
    cells = [
        (t.dtype, _shape(t), format_bytes(t.nbytes), t.sharding, _holders(t), t.name) for t in shown
    ]
    head = ("dtype", "shape", "size", "sharding", "held by", "tensor")
    lines += [
        table(head, cells, width=WIDTH_UNLIMITED),
        *_omitted(len(tensors) - len(shown), "tensors"),
    ]
    return printable("\n".join(lines))


def _chosen_json(chosen: ChosenInterval) -> Json:
    return {
        "every": "auto",
        "steps": chosen.steps,
        "seconds": chosen.interval_s,
        "step_s": chosen.step_s,
        "stall_s": chosen.stall_s,
        "restore_s": chosen.restore_s,
        "nodes": chosen.n_nodes,
        "failures": chosen.failures.as_dict(),
    }


def _chosen_text(chosen: ChosenInterval) -> tuple[str, ...]:
    took = {"stall": chosen.stall_s, "restore": chosen.restore_s, "step": chosen.step_s}
    times = [f"{what} {format_seconds(s)}" for what, s in took.items() if s is not None]
    every = "auto: no save was measured yet"
    if chosen.steps is not None:
        length = "" if chosen.interval_s is None else f" ({format_seconds(chosen.interval_s)})"
        steps = "step" if chosen.steps == 1 else f"{chosen.steps} steps"
        every = f"auto: every {steps}{length}"
    nodes = "node" if chosen.n_nodes == 1 else "nodes"
    return (
        f"every    {every}; {', '.join(times) or 'no time was measured'}",
        f"failures {chosen.failures.describe()}; {chosen.n_nodes} {nodes}",
    )


def _shape(tensor: StoredTensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "scalar"


def _holders(tensor: StoredTensor) -> str:
    """Return how many ranks hold the same part of *tensor*."""
    return "1 rank" if tensor.n_copies == 1 else f"{tensor.n_copies} ranks"


def _omitted(n_left: int, what: str) -> list[str]:
    return [f"… and {n_left} more {what}: --all shows them"] if n_left > 0 else []
