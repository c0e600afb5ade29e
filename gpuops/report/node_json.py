"""A node's history for a program to read; the keys are a contract (``gpuops.node/1``)."""

from dataclasses import asdict
from typing import Any

from gpuops.model import Json
from gpuops.store.node_queries import NodeHistory, NodeRow
from gpuops.units import iso_utc

_TIMES = {
    "t_us": "time",
    "boot_us": "boot",
    "first_us": "first_seen",
    "last_us": "last_seen",
    "end_us": "ended",
    "first_seen_us": "first_seen",
    "last_seen_us": "last_seen",
}
_NAMES = {
    "run_id": "run",
    "ordinal": "attempt",
    "incident_id": "incident",
    "component_id": "id",
}


def node_json(node: NodeRow) -> Json:
    """Return what ``gpuops node ls --json`` says of one node."""
    return _plain(node, without=("id",))


def history_json(history: NodeHistory) -> Json:
    """Return the body of ``gpuops node show --json``; unknown values are null."""
    return {
        "node": node_json(history.node),
        "findings": [_plain(item) for item in history.findings],
        "incidents": [item.to_json() for item in history.incidents],
        "states": [_plain(item) for item in history.states],
        "repairs": [_plain(item) for item in history.repairs],
        "strikes": [_plain(item, without=("node_id",)) for item in history.strikes],
        "components": [_plain(item) for item in history.components],
        "boots": [_plain(item) for item in history.boots],
        "failed_attempts": [_plain(item) for item in history.failed],
    }


def _plain(record: Any, without: tuple[str, ...] = ()) -> Json:  # noqa: ANN401 any of the rows
    values = asdict(record)
    shown: Json = {}
    if "entity_kind" in values:
        shown["entity"] = {"kind": values.pop("entity_kind"), "id": values.pop("entity_id")}
    for name, value in values.items():
        if name in _TIMES:
            shown[_TIMES[name]] = None if value is None else iso_utc(value)
        elif name not in without:
            shown[_NAMES.get(name, name)] = value
    return shown
