"""States made by hand, of tensors cut over ranks as one likes."""

import os

import torch

from gpuops.checkpoint.digest import compute_digest
from gpuops.checkpoint.image import TensorSpec, plan_image, write_metadata_blob
from gpuops.checkpoint.storage.persist import StateOrigin, persist
from gpuops.checkpoint.types import Shard, StateId

DTYPES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
}


def raw(tensor):
    """Return the bytes of *tensor*."""
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def part(tensor, *where):
    """Return the part ``tensor[where]`` with where it lies; *where* are slices."""
    where = tuple(where) + (slice(None),) * (tensor.dim() - len(where))
    starts = [item.indices(size)[0] for item, size in zip(where, tensor.shape, strict=True)]
    return tensor[where], tuple(starts), tuple(tensor.shape)


def whole(tensor):
    """Return all of *tensor* as a part."""
    return tensor, (0,) * tensor.dim(), tuple(tensor.shape)


def image_of(shard, parts, extra=b"", capacity=4096):
    """Return the bytes of the image of *parts*, a mapping of names to parts."""
    specs = [
        TensorSpec(name, DTYPES[t.dtype], tuple(t.shape), len(raw(t)), offsets, shape)
        for name, (t, offsets, shape) in parts.items()
    ]
    layout = plan_image(shard, specs, capacity)
    image = bytearray(layout.nbytes)
    image[: len(layout.header)] = layout.header
    for placed in layout.tensors:
        image[placed.begin : placed.end] = raw(parts[placed.spec.name][0])
    write_metadata_blob(memoryview(image), layout, extra)
    return bytes(image)


def make_state(store, ranks, *, step=1, epoch=0, extras=None, job="made", generation=0):
    """Persist the state whose rank r has the parts ``ranks[r]``; return its id."""
    state = StateId(epoch, step)
    fds, shards = [], {}
    for rank, parts in enumerate(ranks):
        shard = Shard(rank, len(ranks))
        image = image_of(shard, parts, extras[rank] if extras else b"{}")
        fd = os.memfd_create("image")
        fds.append(fd)
        os.write(fd, image)
        shards[shard] = (fd, compute_digest(memoryview(image)))
    try:
        persist(store, state, shards, origin=StateOrigin(job, generation))
    finally:
        for fd in fds:
            os.close(fd)
    return state


def checkpointer_state(store, step, *, epoch=0, shard=None, **given):
    """Persist the state that `gpuops.Checkpointer` would save of *given*; return its id."""
    from gpuops.worker.assemble import StateAssembler
    from gpuops.worker.staging.capture import StateCapturer

    shard = shard or Shard(0, 1)
    parts = StateAssembler(allow_pickle=False, warn=print)
    parts.add_model(given.pop("model", None))
    parts.add_optimizer(given.pop("optimizer", None))
    parts.add_stateful("scheduler", given.pop("scheduler", None))
    parts.add_values("ema", given.pop("ema", None))
    parts.add_values("extra", given.pop("extra", None))
    assert not given
    capture = StateCapturer(parts.adapters, shard, allow_pickle=False).capture(step)
    layout = capture.plan.layout
    image = bytearray(layout.nbytes)
    image[: len(layout.header)] = layout.header
    by_name = dict(zip(capture.plan.names, capture.tensors, strict=True))
    for placed in layout.tensors:
        image[placed.begin : placed.end] = raw(by_name[placed.spec.name].detach())
    write_metadata_blob(memoryview(image), layout, capture.metadata_blob)
    state = StateId(epoch, step)
    fd = os.memfd_create("image")
    try:
        os.write(fd, image)
        shards = {shard: (fd, compute_digest(memoryview(image)))}
        persist(store, state, shards, origin=StateOrigin("made", 0))
    finally:
        os.close(fd)
    return state
