"""Images of shards in sealed memory, as a keeper holds them, of any bytes and without torch."""

import contextlib
import fcntl
import os
import random

from gpuops.checkpoint.digest import compute_digest
from gpuops.checkpoint.image import TensorSpec, plan_image
from gpuops.checkpoint.storage.persist import StateOrigin
from gpuops.checkpoint.types import Shard

_RANDOM_BYTES = 10**6 + 3  # no divisor of the size of a chunk: no two chunks are alike
ORIGIN = StateOrigin("train", 1)


def image_bytes(shard, *, seed=0, nbytes=4096):
    """Return an image of *shard* with about *nbytes* of seeded data."""
    layout = plan_image(shard, [TensorSpec("w", "U8", (nbytes,), nbytes, (0,), (nbytes,))], 64)
    n_data = layout.nbytes - len(layout.header)
    # Of a large one the same bytes over and over.
    some = random.Random(f"{seed} {shard}").randbytes(min(n_data, _RANDOM_BYTES))
    return layout.header + (some * -(-n_data // len(some)))[:n_data]


def sealed(content):
    """Return a descriptor of sealed memory that holds *content*."""
    fd = os.memfd_create("image", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, len(content))
    os.pwrite(fd, content, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


@contextlib.contextmanager
def images(world, *, seed=0, nbytes=4096, ranks=None):
    """Yield {shard: (descriptor, digest)} of a world, or of some *ranks* of it."""
    shards = {}
    try:
        for rank in range(world) if ranks is None else ranks:
            shard = Shard(rank, world)
            content = image_bytes(shard, seed=seed, nbytes=nbytes)
            shards[shard] = sealed(content), compute_digest(memoryview(content))
        yield shards
    finally:
        for fd, _ in shards.values():
            os.close(fd)


def content_of(source):
    """Return all bytes of one of `images`."""
    fd, digest = source
    return os.pread(fd, digest.nbytes, 0)
