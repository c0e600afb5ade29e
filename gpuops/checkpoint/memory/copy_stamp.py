"""The stamp by which a rank records that a copy is complete, also where it is killed right after.

Two words in memory that its keeper reads; each names a lease by its number. ``COPIED`` is written
after the last byte: where a device copies, by the stream that does. ``INTACT`` is written by the
host once nothing that is copied can have been written since the copy began.
"""

from gpuops.checkpoint.memory.shared_buffer import SharedBuffer

COPIED, INTACT = range(2)
STAMP_BYTES = 16


def create_stamp(name: str) -> SharedBuffer:
    """Return new memory for a stamp; it names no lease yet.

    Raises:
        CheckpointError: The kernel refuses.
    """
    return SharedBuffer.create(name, STAMP_BYTES)


def write_stamp(stamp: SharedBuffer, word: int, number: int) -> None:
    """Write *number*, that of a lease, into one word."""
    stamp.view.cast("q")[word] = number


def is_stamped(stamp: SharedBuffer, number: int) -> bool:
    """Return whether the copy under the lease *number* is complete and not torn."""
    return stamp.view.cast("q").tolist() == [number, number]
