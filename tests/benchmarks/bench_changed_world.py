"""What a rank reads of a state that another number of ranks saved, and how long it plans.

The state is in sparse files: headers, and zeros. A rank reads and verifies all that it needs, but
keeps none of it, and its tensors are never written. ``PYTHONPATH=tests python
tests/benchmarks/bench_changed_world.py FOLDER SAVED LOADS TENSORS ROWS COLUMNS RANK [RANK ...]``
prints a line of JSON for each rank.
"""

import json
import mmap
import os
import sys
import time
from pathlib import Path

from support.placed import as_rank
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as ByRows
from torch.distributed.tensor import empty

from gpuops.checkpoint.digest import chunk_hash, digest_root
from gpuops.checkpoint.image import TensorSpec, plan_image, write_metadata_blob
from gpuops.checkpoint.manifest import MANIFEST, Manifest, ShardRecord, encode_manifest
from gpuops.checkpoint.partial_image import PieceMap
from gpuops.checkpoint.pieces import encode_block, pieces_file_name
from gpuops.checkpoint.storage.address import open_store
from gpuops.checkpoint.storage.stored_ranges import StoredRanges
from gpuops.checkpoint.types import CHUNK_BYTES, Digest, Shard, StateId
from gpuops.convert.values import STATE_FORMAT
from gpuops.worker.state.saved_state import SavedState

SAVED, LOADS, TENSORS, ROWS, COLUMNS = map(int, sys.argv[2:7])
NAMES = [f"model.layers.{number}.weight" for number in range(TENSORS)]
STATE = StateId(0, 7)
BLOB = json.dumps({"format": STATE_FORMAT, "step": STATE.step, "parts": {}}).encode()
ZEROS = bytes(CHUNK_BYTES)
ZERO_HASH = chunk_hash(ZEROS)
ZERO_BLOCK = encode_block(memoryview(ZEROS))


def layout_of(rank):
    rows = -(-ROWS // SAVED)
    begin, end = min(rank * rows, ROWS), min((rank + 1) * rows, ROWS)
    nbytes = 4 * (end - begin) * COLUMNS
    specs = [
        TensorSpec(name, "F32", (end - begin, COLUMNS), nbytes, (begin, 0), (ROWS, COLUMNS))
        for name in NAMES
    ]
    return plan_image(Shard(rank, SAVED), specs, 4096)


def put_shard(folder, rank):
    """Write the sparse image of a rank and the hashes of its pieces; return its record."""
    layout = layout_of(rank)
    table, blocks = bytearray(), bytearray()
    with (folder / layout.shard.file_name).open("w+b") as file:
        file.truncate(layout.nbytes)
        file.write(layout.header)
        file.flush()
        with mmap.mmap(file.fileno(), 0) as mapped, memoryview(mapped) as view:
            write_metadata_blob(view, layout, BLOB)
            for at in range(0, layout.nbytes, CHUNK_BYTES):
                end = at + CHUNK_BYTES
                if len(layout.header) <= at and end <= layout.metadata_blob.begin:
                    hashed, block = ZERO_HASH, ZERO_BLOCK
                else:
                    with view[at:end] as chunk:
                        hashed = chunk_hash(chunk)
                        block = encode_block(chunk)
                table += hashed
                blocks += block
    (folder / pieces_file_name(layout.shard)).write_bytes(blocks)
    root = digest_root(layout.nbytes, bytes(table))
    return ShardRecord(layout.shard, layout.header_hash, Digest(layout.nbytes, bytes(table), root))


def put(folder):
    """Write the sparse state; return its bytes."""
    folder = folder / STATE.name
    folder.mkdir(parents=True)
    manifest = Manifest(
        state=STATE,
        world=SAVED,
        shards=tuple(put_shard(folder, rank) for rank in range(SAVED)),
        created="2026-01-01T00:00:00Z",
        version="0",
        generation=0,
        job="bench",
    )
    (folder / MANIFEST).write_bytes(encode_manifest(manifest))
    return manifest.nbytes


class Image:
    """Reads and verifies what is asked for, as a `PartialImage` does, or only notes it."""

    def __init__(self, store, record):
        self._ranges = StoredRanges(store, STATE, record)
        self._pieces = PieceMap(record.digest.nbytes)
        with store.local_shard_path(STATE, record.shard).open("rb") as file:
            self.view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        self.is_planning = False

    def ensure(self, ranges):
        missing = self._pieces.missing(ranges)
        if not self.is_planning:
            self._ranges.read(missing, self._mark)

    def _mark(self, begin, data):
        self._pieces.mark(begin, begin + len(data))


def bytes_read():
    """Return how many bytes this process has read; a mapping of a header is not counted twice."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def load(folder, rank):
    """Return what a rank reads, and how long that takes."""
    store, before = open_store(str(folder)), bytes_read()
    with as_rank(rank, LOADS):
        mesh = init_device_mesh("cpu", (LOADS,))
        targets = [
            empty(ROWS, COLUMNS, device_mesh=mesh, placements=[ByRows(0)]) for _name in NAMES
        ]
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        manifest = store.read_manifest(STATE)
        images = [Image(store, record) for record in manifest.shards]
        saved = SavedState(
            lambda shard: images[shard.rank],
            step=STATE.step,
            world=SAVED,
            rank=rank,
            own_world=LOADS,
        )
        for name, target in zip(NAMES, targets, strict=True):
            saved.request(name, target)
        list(saved.names("model."))  # reads every header
        headers_bytes = bytes_read() - before
        for image in images:
            image.is_planning = True
        saved.fetch()
        plan_s, plan_cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
        for image in images:
            image.is_planning = False
        saved.fetch()
        own_bytes = sum(target.to_local().nbytes for target in targets)
    found_bytes = bytes_read() - before
    return {
        "rank": rank,
        "own_bytes": own_bytes,
        "read_bytes": found_bytes,
        "of_these_manifest_and_headers": headers_bytes,
        "times_own": round(found_bytes / own_bytes, 4),
        "plan_s": round(plan_s, 2),
        "plan_cpu_s": round(plan_cpu_s, 2),
    }


def main():
    folder = Path(sys.argv[1])
    if not (folder / STATE.name).exists():
        print(json.dumps({"state_bytes": put(folder)}), flush=True)
    for rank in map(int, sys.argv[7:]):
        print(json.dumps(load(folder, rank)), flush=True)
    print(json.dumps({"load_average": [round(value, 1) for value in os.getloadavg()]}))


if __name__ == "__main__":
    main()
