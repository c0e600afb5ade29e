"""Digests of replicas: equal for equal bytes, and of a device's tensors without reading them."""

import pytest
import torch
import torch.distributed as dist
from support.fake_cuda import FakeCuda
from support.keeper_ranks import LEASE, reserved_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpuops.checkpoint.types import Shard
from gpuops.worker.assemble import StateAssembler
from gpuops.worker.staging import replica_digest
from gpuops.worker.staging.capture import StateCapturer
from gpuops.worker.staging.replica_digest import device_digest, host_digest
from gpuops.worker.staging.slot_copier import SlotCopier

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(replica_digest, "_CHUNK_WORDS", 16)
    replica_digest._weights.cache_clear()
    yield
    replica_digest._weights.cache_clear()


def both(tensor):
    return host_digest(tensor), bytes(device_digest(tensor).numpy())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 7, 128, 1001])
@pytest.mark.usefixtures("small_chunks")
def test_equal_values_have_equal_digests_however_they_lie_in_memory(n, dtype):
    tensor = torch.arange(n).to(dtype)
    shifted = torch.cat([torch.zeros(1, dtype=dtype), tensor])[1:]
    spread = torch.stack([tensor, tensor], dim=-1)[..., 0]

    assert both(tensor) == both(shifted) == both(spread)
    assert all(len(digest) == 16 for digest in both(tensor))


@pytest.mark.usefixtures("small_chunks")
def test_each_flipped_bit_and_each_exchange_changes_the_digest():
    data = torch.randint(0, 256, (300,), dtype=torch.uint8)
    seen = {bytes(device_digest(data).numpy())}
    for bit in range(8 * len(data)):
        other = data.clone()
        other[bit // 8] ^= 1 << (bit % 8)
        seen.add(bytes(device_digest(other).numpy()))
    assert len(seen) == 8 * len(data) + 1

    words = torch.arange(64, dtype=torch.int64)
    exchanged = words.clone()
    exchanged[[3, 40]] = words[[40, 3]]  # of two chunks
    negated = (words.double() + 1) * torch.tensor([-1.0, 1.0] * 32)
    assert both(words)[1] != both(exchanged)[1]
    assert both(words.double() + 1)[1] != both(negated)[1]  # the highest bits alone


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda(monkeypatch)
    fake.hold_tensors(monkeypatch)
    return fake


@pytest.fixture
def shares(cuda):
    """Return what each of two ranks of a node writes of the same model, as on a device."""

    def share(rank, change=lambda _model: None, **options):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            model[0].bias.requires_grad_(False)
            model = DistributedDataParallel(model)
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.SGD(trained, lr=0.1)
            parts = StateAssembler(allow_pickle=False, warn=pytest.fail)
            parts.add_model(model)
            parts.add_optimizer(optimizer)
            capturer = StateCapturer(
                parts.adapters, Shard(rank, 2), allow_pickle=False, node_ranks=(0, 1)
            )
            change(model)
            capture = capturer.capture(1)
        finally:
            dist.destroy_process_group()
        layout = capture.plan.layout
        with reserved_of(layout) as reserved:
            memory = reserved.slots[0]
            copier = SlotCopier(capture.plan, reserved, pytest.fail)
            pending = copier.start(LEASE, capture, **options)
            pending.wait()
            (shared,) = layout.shared
            begin, end = layout.digests.begin, layout.digests.end
            found = bytes(memory.view[begin:end])
            digests = [found[at : at + 16] for at in range(0, len(found), 16)]
            names = [tensor.spec.name for tensor in layout.tensors]
            copier.close()
        return names, dict(zip(shared.stored_names, digests, strict=True)), pending, model

    return share


@pytest.mark.parametrize("overlap", [True, False])
def test_ranks_with_state_on_devices_copy_a_part_each_and_digest_all(cuda, shares, overlap):
    names, digests, _, model = shares(0, overlap=overlap)
    others, other_digests, _, _ = shares(1, overlap=overlap)

    assert not set(names) & set(others)
    assert digests == other_digests
    assert set(digests) == {*names, *others}
    in_turn = [work for work in cuda.works if work.stream is cuda.computing]
    assert len(cuda.works) == 4 + 8 + 2  # copies, digests and stamps
    assert len(in_turn) == (1 + 2 if overlap else 4 + 8), "of the frozen one, or of all"
    for name, parameter in model.module.named_parameters():
        assert digests[f"model.{name}"] == both(parameter)[1]


def test_a_flip_on_the_owner_changes_its_own_digest(shares):
    def flip(model):
        with torch.no_grad():
            model.module[1].weight.view(torch.int32)[2, 3] ^= 1

    _, good, _, _ = shares(0)
    _, bad, _, _ = shares(1, flip)
    assert {name for name in good if good[name] != bad[name]} == {"model.1.weight"}


def test_what_is_written_while_its_digest_is_made_is_torn(shares):
    for rank in (0, 1):
        _, _, pending, model = shares(rank, overlap=True)
        with torch.no_grad():
            model.module[0].weight.add_(1)
        assert pending.written() == ["model.0.weight"]
