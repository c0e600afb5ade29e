"""The copy of a captured state into a slot.

On the host the copy is done when `SlotCopier.start` returns; on a device, see `device_copy`.
"""

from collections.abc import Callable, Sequence

import torch

from gpuops.checkpoint.image import write_digests, write_metadata_blob
from gpuops.checkpoint.keeper.messages import Lease
from gpuops.checkpoint.keeper.rank_client import ReservedMemory
from gpuops.checkpoint.memory.copy_stamp import COPIED, INTACT, write_stamp
from gpuops.checkpoint.sharing import DIGEST_BYTES
from gpuops.checkpoint.types import CheckpointError, KeeperError
from gpuops.convert.tensors import views_of
from gpuops.worker.staging.copy_plan import CapturedState, CopyPlan
from gpuops.worker.staging.device_copy import DeviceCopier
from gpuops.worker.staging.pending_copy import PendingCopy
from gpuops.worker.staging.pinned_buffer import PinnedBuffer, map_in_background, place_near
from gpuops.worker.staging.replica_digest import host_digest
from gpuops.worker.staging.tensor_copy import copy_tensors


class SlotCopier:
    """The slots of one layout. *warn* is called once where memory cannot be pinned."""

    def __init__(
        self, plan: CopyPlan, reserved: ReservedMemory, warn: Callable[[str], None]
    ) -> None:
        self.plan = plan
        self._slots = tuple(reserved.slots)
        self._stamp = reserved.stamp
        self._views: list[tuple[torch.Tensor, ...] | None] = [None] * len(self._slots)
        self._pinned: list[PinnedBuffer] = []
        self._device_copier = (
            None if plan.device is None else DeviceCopier(plan, plan.device, self._stamp)
        )
        self._warn = warn

    @torch.no_grad()
    def start(self, lease: Lease, capture: CapturedState, *, overlap: bool = False) -> PendingCopy:
        """Copy *capture* into its slot, with its header; return an object that tracks completion.

        *overlap*: `PendingCopy.wait_before_step` will be called before the optimizers change their
        tensors.
        """
        memory = self._slots[lease.slot].view
        layout = self.plan.layout
        views = self._prepare(lease.slot)
        memory[: len(layout.header)] = layout.header
        write_metadata_blob(memory, layout, capture.metadata_blob)
        if self._device_copier is not None:
            rows = self._digest_rows(lease.slot)
            return self._device_copier.start(
                memory, views, rows, capture, lease.number, overlap=overlap
            )
        copy_tensors(views, capture.tensors)
        write_digests(memory, layout, (host_digest(each.part) for each in capture.digested))
        for word in (COPIED, INTACT):
            write_stamp(self._stamp, word, lease.number)
        return PendingCopy()

    def populate(self, n_threads: int | None) -> None:
        """Have all slots allocated, mapped and pinned; None: only mapped, in the background.

        Raises:
            KeeperError: There is not enough memory; the message has the figures.
        """
        place_near(self.plan.device, self._slots)
        if n_threads is None:
            map_in_background(self._slots)
        else:
            for slot in range(len(self._slots)):
                self._prepare(slot, n_threads)

    def close(self) -> None:
        """Release the memory; no copy may be in progress."""
        for pin in self._pinned:
            pin.release()
        self._pinned.clear()
        self._views = [None] * len(self._slots)
        for memory in (*self._slots, self._stamp):
            memory.close()

    def _prepare(self, slot: int, n_threads: int = 1) -> tuple[torch.Tensor, ...]:
        views = self._views[slot]
        if views is None:
            memory = self._slots[slot]
            try:
                memory.populate(n_threads=n_threads)
            except CheckpointError as exc:
                raise KeeperError(str(exc)) from exc  # more memory may be available later
            if self.plan.device is not None:
                if not self._pinned:
                    silent = PinnedBuffer(self._stamp, self.plan.device, lambda _why: None)
                    self._pinned.append(silent)
                self._pinned.append(PinnedBuffer(memory, self.plan.device, self._warn))
            views = self._views[slot] = views_of(memory.view, self.plan.layout, self.plan.names)
        return views

    def _digest_rows(self, slot: int) -> Sequence[torch.Tensor]:
        """Return where each digest goes."""
        digests = self.plan.layout.digests
        if digests is None or digests.begin == digests.end:
            return ()
        rows = torch.frombuffer(
            self._slots[slot].view,
            dtype=torch.uint8,
            count=digests.spec.nbytes,
            offset=digests.begin,
        )
        return rows.view(-1, DIGEST_BYTES).unbind()
