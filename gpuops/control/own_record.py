"""The record of this run out of what the control store holds."""

from gpuops.control.record import ControlRecord, RecordError
from gpuops.control.store import ControlStoreError, ControlStoreResetError, Entry


def read_own_record(entry: Entry, run_id: str) -> ControlRecord:
    """Return the record in *entry*.

    Raises:
        ControlStoreResetError: It is gone, or another run's that came after ours.
        ControlStoreError: It is none.
    """
    if entry.version:
        try:
            record = ControlRecord.from_bytes(entry.value)
        except RecordError as exc:
            raise ControlStoreError(
                f"the board does not hold a record of this version: {exc}"
            ) from exc
        if record.run_id == run_id:
            return record
    why = "holds the record of another run" if entry.version else "has no record"
    raise ControlStoreResetError(f"the board {why}: this one is over, or was cleaned up")
