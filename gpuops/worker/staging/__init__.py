"""The copy of a rank's state into a slot of shared memory, while training goes on.

* `capture.StateCapturer` reads the state; `copy_plan` lays its tensors out in an image.
* `slot_copier.SlotCopier` brings it into a slot: on the host at once, from a device by
  `device_copy`, whose `pending_copy.PendingCopy` the next optimizer step waits for. The last thing
  written is the copy's stamp, which the keeper reads.
* `pinned_buffer` registers slots with CUDA; `replica_digest` is for tensors that another rank
  copies.
"""
