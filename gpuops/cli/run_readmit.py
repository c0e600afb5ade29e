"""``gpuops run readmit``: a repaired node may join the run again that left it out."""

from pathlib import Path

import click

from gpuops.cli.options import settings_of, store_option
from gpuops.cli.run_status import connect_control_store, run_dir_option, run_folder
from gpuops.control.record import RECORD_KEY, ControlRecord, RunPhase, read_own_record
from gpuops.control.store import ControlStore
from gpuops.control.transitions import readmit as readmit_node
from gpuops.errors import UsageError
from gpuops.log import printable
from gpuops.report.run_status import read_states


@click.command("readmit", epilog="Example: gpuops run readmit gpu017")
@click.argument("node")
@click.argument("run", required=False)
@run_dir_option
@store_option
@click.pass_context
def readmit(
    ctx: click.Context, node: str, run: str | None, run_dir: Path | None, store: str | None
) -> int:
    """Let NODE, which the run has left out, join it again after its repair.

    Its agent is checked first. One that waits under srun joins by itself; else start it there
    again. A run that may grow restarts for it at its next checkpoint.

    RUN is the end (or the beginning) of a run's id; without it, the newest run of the folder.
    """
    settings = settings_of(ctx, store__url=store)
    folder = run_folder(run_dir or settings.run_dir, run)
    found = [] if folder is None else list(read_states(folder))
    if not found:
        raise UsageError(
            f"no run in {run_dir or settings.run_dir}: name its folder with --run-dir, on a node "
            "that can read it"
        )
    address = found[0].get("board")
    board = connect_control_store(address, settings) if isinstance(address, dict) else None
    if board is None:
        raise UsageError("the agents of this run cannot be reached from here: it is on one node")
    try:
        record = _readmit(board, str(found[0].get("run_id")), node)
    finally:
        board.close()
    click.echo(printable(f"node {node} may join the run {record.folder} again"))
    return 0


def _readmit(store: ControlStore, run_id: str, node: str) -> ControlRecord:
    """Write that *node* may join again; return the record.

    Raises:
        UsageError: The run has ended, or has not left the node out.
        ControlStoreError: See `ControlStore`.
    """
    while True:
        entry = store.get(RECORD_KEY)
        record = read_own_record(entry, run_id)
        changed = readmit_node(record, node)
        if changed is None:
            if record.phase is RunPhase.STOP:
                raise UsageError("this run has ended; start it again with the node")
            names = ", ".join(sorted(record.excluded)) or "none"
            raise UsageError(f"the run has not left {node} out; left out: {names}")
        written, _entry = store.compare_and_set(
            RECORD_KEY, changed.to_bytes(), version=entry.version
        )
        if written:
            return changed
