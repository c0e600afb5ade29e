"""Images as others read them: the safetensors library, and torch's reader across world sizes."""

import os
import subprocess
import sys

import pytest

from gpuops.checkpoint.image import (
    ITEMSIZE_BYTES,
    TensorSpec,
    metadata_blob_name,
    plan_image,
    read_layout,
    write_metadata_blob,
)
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.types import Shard

pytestmark = pytest.mark.torch

torch = pytest.importorskip("torch", reason="needs the extra torch")
safetensors = pytest.importorskip("safetensors", reason="needs the extra torch")

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SHAPES = [(), (5,), (3, 4), (0,), (0, 7), (2, 0, 3), (1, 1, 1, 9)]
SEED = 20_26


def random_tensor(dtype, shape, generator):
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def as_bytes(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def filled(shard, parts, extra=b"{}"):
    """A slot with *parts*: name to (tensor, offsets, global shape)."""
    specs = [
        TensorSpec(name, NAMES[t.dtype], tuple(t.shape), t.nbytes, tuple(offsets), tuple(whole))
        for name, (t, offsets, whole) in parts.items()
    ]
    layout = plan_image(shard, specs, 64)
    slot = SharedBuffer.create("test", layout.nbytes)
    slot.view[: len(layout.header)] = layout.header
    for placed in layout.tensors:
        tensor = parts[placed.spec.name][0]
        if tensor.numel():
            torch.frombuffer(
                slot.view, dtype=tensor.dtype, count=tensor.numel(), offset=placed.begin
            ).view(tensor.shape).copy_(tensor)
    write_metadata_blob(slot.view, layout, extra)
    return slot


def test_every_dtype_and_shape_is_read_by_the_safetensors_library(tmp_path):
    assert DTYPES.keys() == ITEMSIZE_BYTES.keys()
    generator = torch.Generator().manual_seed(SEED)
    tensors = {
        f'Schicht 層 \U0001f525 {name}\x00"\\ {shape}': random_tensor(dtype, shape, generator)
        for name, dtype in DTYPES.items()
        for shape in SHAPES
    }
    tensors[""] = torch.arange(3)
    whole = {name: (t, [0] * t.ndim, t.shape) for name, t in tensors.items()}

    with filled(Shard(0, 1), whole) as slot:
        path = tmp_path / "x.safetensors"
        path.write_bytes(slot.view)
        assert read_layout(slot.view).nbytes == path.stat().st_size

    with safetensors.safe_open(path, "pt") as file:
        assert set(file.keys()) == {*tensors, metadata_blob_name(0)}
        for name, tensor in tensors.items():
            found = file.get_tensor(name)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert as_bytes(found) == as_bytes(tensor)


def test_the_library_loads_the_bytes_of_a_slot():
    from safetensors.torch import load

    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    with filled(Shard(0, 1), {"w": (tensor, (0, 0), (2, 3))}, b'{"step": 3}') as slot:
        found = load(bytes(slot.view))

    assert torch.equal(found.pop("w"), tensor)
    assert bytes(found.pop(metadata_blob_name(0))[8:19].tolist()) == b'{"step": 3}'
    assert found == {}


OUTLIVED = """
import torch
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
slot = SharedBuffer.create("outlived", 4000)
tensor = torch.frombuffer(slot.view, dtype=torch.float32)
slot.close()
tensor.fill_(3)
print(tensor.sum().item())
"""


def test_a_tensor_over_a_slot_that_was_closed_is_still_whole():
    # It would be SIGSEGV: such a tensor keeps its buffer alive, but does not lock it.
    done = subprocess.run(
        [sys.executable, "-P", "-c", OUTLIVED], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout) == (0, "3000.0\n"), done.stderr


def rows_of(n_rows, rank, world):
    """Begin and end of the rows of *rank*, cut as ``torch.chunk`` cuts: the last ones get less."""
    each = -(-n_rows // world)
    return min(rank * each, n_rows), min((rank + 1) * each, n_rows)


def saved_by_four(state):
    slots = []
    for rank in range(4):
        parts = {}
        for name, tensor in state.items():
            begin, end = rows_of(len(tensor), rank, 4)
            offsets = [begin] + [0] * (tensor.ndim - 1)
            parts[name] = (tensor[begin:end], offsets, tensor.shape)
        slots.append(filled(Shard(rank, 4), parts))
    return slots


def load_rank(rank, world, port, folder, state, results):
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard as ShardOf
    from torch.distributed.tensor import distribute_tensor

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    wanted = {
        name: distribute_tensor(torch.zeros_like(tensor), mesh, [ShardOf(1)])
        for name, tensor in state.items()
    }
    dcp.load(wanted, storage_reader=dcp.HuggingFaceStorageReader(folder))
    equal = {name: torch.equal(t.full_tensor(), state[name]) for name, t in wanted.items()}
    results.put((rank, equal))
    dist.destroy_process_group()


@pytest.mark.timeout(240)
def test_torch_reshards_four_row_shards_to_three_column_shards_out_of_the_slots(tmp_path):
    import torch.distributed as dist
    import torch.multiprocessing as mp

    generator = torch.Generator().manual_seed(SEED)
    state = {
        "even": torch.randn(8, 9, generator=generator),
        "uneven": torch.randn(7, 5, generator=generator).to(torch.bfloat16),
        "fewer rows than ranks": torch.randn(3, 6, generator=generator),
        "mask": torch.randint(0, 2, (8, 3), generator=generator).bool(),
    }
    slots = saved_by_four(state)
    for rank, slot in enumerate(slots):
        link = tmp_path / Shard(rank, 4).file_name
        link.symlink_to(f"/proc/{os.getpid()}/fd/{slot.fd}")

    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = mp.start_processes(
        load_rank, (3, store.port, str(tmp_path), state, results), nprocs=3, join=False
    )
    while not started.join():
        pass

    found = dict(results.get() for _ in range(3))
    assert found == {rank: dict.fromkeys(state, True) for rank in range(3)}
    for slot in slots:
        slot.close()


def test_torch_loads_whole_tensors_out_of_shards_in_one_process(tmp_path):
    import torch.distributed.checkpoint as dcp

    whole = torch.arange(24.0).reshape(6, 4)
    state = {"w": whole, "phases": whole[:, 0].to(torch.complex64), "mask": whole > 5}
    for slot, rank in zip(saved_by_four(state), range(4), strict=True):
        (tmp_path / Shard(rank, 4).file_name).write_bytes(slot.view)
        slot.close()
    wanted = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with pytest.warns(UserWarning, match="in a single process"):
        dcp.load(wanted, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)

    for name, tensor in state.items():
        assert torch.equal(wanted[name], tensor)
