"""``dcp.save``, ``async_save`` and ``load`` with gpuops' writer, reader and stager."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.made_states import checkpointer_state
from support.placed import as_rank, sharded
from torch.distributed.tensor import Shard as ByRows

from gpuops.checkpoint.storage.address import open_store
from gpuops.checkpoint.storage.directory import DirectoryStore
from gpuops.checkpoint.storage.inspection import verify_state
from gpuops.checkpoint.types import CheckpointError, Shard, StateId
from gpuops.convert.export import ConvertFormat, export_state
from gpuops.convert.state_reader import StateReader
from gpuops.errors import UsageError
from gpuops.worker.adapters.dcp import GpuopsReader, GpuopsStager, GpuopsWriter
from gpuops.worker.adapters.dcp_writer import _epochs

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def state(fill=1.0):
    return {
        "model": {
            "w": torch.arange(6.0).reshape(2, 3) * fill,
            "b": torch.full((4,), fill).bfloat16(),
            "e": torch.zeros(0, 3),
            "s": torch.tensor(3.5 * fill),
            "t": torch.arange(6.0).reshape(2, 3).T * fill,
            "c": torch.ones(2, dtype=torch.complex64) * fill,
        },
        "optimizer": {"state": {"w": {"step": torch.tensor(5.0), "m": torch.ones(2) * fill}}},
        "step": int(10 * fill),
        "list": [1, "two", torch.ones(2) * fill],
    }


def blank():
    made = state(0.0)
    made["list"][1] = ""
    return made


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path / "s")


def failure(exc):
    """Return the text of what a rank raised, which dcp wraps."""
    wrapped = getattr(exc.value, "failures", {})
    return " ".join(repr(failed) for failed, _ in wrapped.values()) or repr(exc.value)


def test_what_is_saved_is_loaded(store):
    dcp.save(state(), storage_writer=GpuopsWriter(store.address, step=7))
    (stored,) = store.list_states()
    assert stored.state == StateId(0, 7)
    assert verify_state(store, stored.state) == []
    assert stored.manifest.job == "dcp"

    loaded = blank()
    dcp.load(loaded, storage_reader=GpuopsReader(store.address))
    assert same(loaded, state())


def test_the_step_is_that_of_the_checkpoint_id(store):
    writer = GpuopsWriter(store.address)
    for step in (3, 4):
        dcp.save(state(step), checkpoint_id=f"run5/step-{step}", storage_writer=writer)
    reader = GpuopsReader(store.address)
    for step in (3, 4):
        loaded = blank()
        dcp.load(loaded, checkpoint_id=f"step-{step}", storage_reader=reader)
        assert same(loaded, state(step))
    newest = blank()
    dcp.load(newest, storage_reader=GpuopsReader(store.address))
    assert same(newest, state(4))


def test_nobody_says_the_step(store):
    with pytest.raises(dcp.api.CheckpointException) as exc:
        dcp.save(state(), storage_writer=GpuopsWriter(store.address))
    assert "step of this state is unknown" in failure(exc)
    assert store.list_states() == ()


def test_a_step_that_is_made_again_is_newer(store):
    for fill in (1.0, 2.0):
        dcp.save(state(fill), storage_writer=GpuopsWriter(store.address, step=7))
    dcp.save(state(3.0), storage_writer=GpuopsWriter(store.address, step=5))
    assert [stored.state for stored in store.list_states()] == [
        StateId(2, 5),
        StateId(1, 7),
        StateId(0, 7),
    ]
    loaded = blank()
    dcp.load(loaded, storage_reader=GpuopsReader(store.address))
    assert same(loaded, state(3.0))


def test_under_a_url(tmp_path):
    address = f"memory://{tmp_path.name}"
    for step in (1, 2):
        dcp.save(state(step), storage_writer=GpuopsWriter(address, step=step))
    loaded = blank()
    dcp.load(loaded, storage_reader=GpuopsReader(address))

    assert same(loaded, state(2))
    assert [stored.state.step for stored in open_store(address).list_states()] == [2, 1]


def test_another_start_of_the_job_is_another_epoch(store):
    dcp.save(state(), storage_writer=GpuopsWriter(store.address, step=7))
    _epochs.clear()  # as in a new process
    dcp.save(state(), storage_writer=GpuopsWriter(store.address, step=8))
    dcp.save(state(), storage_writer=GpuopsWriter(store.address, step=9))

    assert [stored.state for stored in store.list_states()] == [
        StateId(1, 9),
        StateId(1, 8),
        StateId(0, 7),
    ]


def test_retention(store):
    for step in range(1, 6):
        dcp.save(state(), storage_writer=GpuopsWriter(store.address, step=step, keep_last=2))

    assert [stored.state.step for stored in store.list_states()] == [5, 4]


@pytest.mark.parametrize("offset", [100, 4096, -5000, -1])
def test_a_flipped_bit_is_found(store, offset):
    dcp.save({"w": torch.arange(10_000.0)}, storage_writer=GpuopsWriter(store.address, step=7))
    path = store.local_shard_path(store.list_states()[0].state, Shard(0, 1))
    content = bytearray(path.read_bytes())
    content[offset] ^= 8
    path.write_bytes(content)

    with pytest.raises((dcp.api.CheckpointException, CheckpointError)) as exc:
        dcp.load({"w": torch.zeros(10_000)}, storage_reader=GpuopsReader(store.address))
    assert "shard-00000-of-00001.safetensors of step 7" in failure(exc)


def test_a_rank_reads_its_part_only_and_damage_elsewhere_is_not_read(tmp_path):
    address = f"local://{tmp_path / 'states'}"
    full = torch.randn(1024, 1024)
    dcp.save({"w": full}, storage_writer=GpuopsWriter(address, step=7))
    (path,) = (tmp_path / "states").glob("*/shard-*.safetensors")
    content = bytearray(path.read_bytes())
    content[len(content) // 4] ^= 8  # in the first half of the rows, and in the same chunk
    path.write_bytes(content)

    def load(rank):
        with as_rank(rank, 2):
            target = sharded(torch.zeros(1024, 1024), (2,), [ByRows(0)])
            dcp.load({"w": target}, storage_reader=GpuopsReader(address), no_dist=True)
            return target.to_local()

    assert torch.equal(load(1), full[512:])
    with pytest.raises((dcp.api.CheckpointException, CheckpointError)) as exc:
        load(0)
    assert "is corrupt in piece 0 of 1" in failure(exc)


def test_a_failed_save_leaves_nothing_and_harms_no_other(store):
    dcp.save(state(), storage_writer=GpuopsWriter(store.address, step=7))
    with pytest.raises(dcp.api.CheckpointException) as exc:
        dcp.save(
            {"w": torch.zeros(2, dtype=torch.complex128)},
            storage_writer=GpuopsWriter(store.address, step=8),
        )
    assert "view_as_real" in failure(exc)
    assert [stored.state.step for stored in store.list_states()] == [7]


def test_a_value_that_would_run_code_does_not(store, tmp_path):
    proof = tmp_path / "ran"

    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {proof}",)

    Bomb.__qualname__ = "Bomb"
    dcp.save({"x": Bomb(), "w": torch.ones(1)}, storage_writer=GpuopsWriter(store.address, step=1))

    loaded = {"w": torch.zeros(1)}
    dcp.load(loaded, storage_reader=GpuopsReader(store.address))
    assert loaded["w"].item() == 1
    with pytest.raises(dcp.api.CheckpointException) as exc:
        dcp.load({"x": None, "w": torch.zeros(1)}, storage_reader=GpuopsReader(store.address))
    assert "refused" in failure(exc)
    assert not proof.exists()
    dcp.load({"x": None}, storage_reader=GpuopsReader(store.address, trust=True))
    assert proof.exists(), "the bomb is none"


def test_there_is_no_such_state(store):
    with pytest.raises(dcp.api.CheckpointException) as exc:
        dcp.load({"w": torch.zeros(1)}, storage_reader=GpuopsReader(store.address, step=3))
    assert "no state of step 3" in failure(exc)


def test_no_coordination_is_refused(store):
    with pytest.raises(UsageError, match="use_collectives"):
        dcp.save(state(), storage_writer=GpuopsWriter(store.address, step=1), use_collectives=False)


def test_states_of_the_checkpointer_are_read(store):
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2)
    checkpointer_state(store, 4, model=model)
    fresh = torch.nn.Linear(3, 2)
    into = {"model": fresh.state_dict()}
    dcp.load(into, storage_reader=GpuopsReader(store.address))

    assert same(into["model"], dict(model.state_dict()))


@pytest.mark.parametrize("form", [ConvertFormat.TORCH, ConvertFormat.DCP])
def test_an_export_has_the_nested_state(store, tmp_path, form):
    dcp.save(state(), storage_writer=GpuopsWriter(store.address, step=7))
    stored = store.list_states()[0]
    with StateReader(store, stored.manifest, tmp_path) as reader:
        export_state(reader, tmp_path / "out", form)

    if form is ConvertFormat.TORCH:
        loaded = torch.load(tmp_path / "out", weights_only=True)
        del loaded["gpuops"]
    else:
        loaded = blank()
        dcp.load(loaded, checkpoint_id=tmp_path / "out")
    assert same(loaded, state())


# The stager.


def test_staged_states_are_not_changed_by_training_nor_by_the_next_one(store):
    stager = GpuopsStager()
    live = state()
    one = stager.stage(live)
    live["model"]["w"].add_(1)
    two = stager.stage(live)
    live["model"]["w"].add_(1)

    assert same(one, state())
    assert torch.equal(two["model"]["w"], state()["model"]["w"] + 1)
    assert stager.n_created == 2


def test_memory_is_used_again_once_nobody_refers_to_it():
    stager = GpuopsStager(slots=2)
    for _ in range(20):
        staged = stager.stage({"w": torch.ones(1000), "v": torch.ones(3)})
        assert staged["w"].sum() == 1000
    assert stager.n_created == 2
    assert stager.n_waits == 0


def test_a_buffer_that_is_in_use_is_waited_for_and_never_overwritten():
    held = []

    def wait(_seconds):
        held.clear()

    stager = GpuopsStager(slots=1, wait=wait)
    held.append(stager.stage({"w": torch.ones(4)}))
    staged = stager.stage({"w": torch.zeros(4)})

    assert stager.n_waits == 1
    assert staged["w"].sum() == 0


def test_what_somebody_keeps_does_not_stop_the_training(caplog):
    now = iter(range(1000))
    stager = GpuopsStager(slots=1, wait_s=5, clock_s=lambda: next(now), wait=lambda _s: None)
    kept = [stager.stage({"w": torch.full((4,), fill)}) for fill in (1.0, 2.0, 3.0)]

    assert [one["w"][0].item() for one in kept] == [1, 2, 3]
    assert stager.n_created == 3
    assert "One more buffer is allocated" in caplog.text


def test_a_state_that_grows_and_shrinks():
    stager = GpuopsStager(slots=2)
    for size in (10, 100_000, 10, 200_000, 0, 7):
        staged = stager.stage({"w": torch.full((size,), float(size)), "n": size})
        assert torch.equal(staged["w"], torch.full((size,), float(size)))
        assert staged["n"] == size
        del staged


def test_what_is_shared_stays_shared_and_what_is_odd_is_copied():
    tied = torch.ones(3)
    sparse = torch.ones(2, 2).to_sparse()
    staged = GpuopsStager().stage(
        {"a": tied, "b": [tied, (tied[1:], {"x": 1})], "s": sparse, "p": torch.nn.Parameter(tied)}
    )

    assert staged["a"] is staged["b"][0]
    assert staged["s"].is_sparse
    assert staged["s"] is not sparse
    tied.add_(1)
    assert torch.equal(staged["a"], torch.ones(3))
    assert torch.equal(staged["p"].detach(), torch.ones(3))


def test_close_gives_memory_back_and_leaves_what_is_in_use():
    stager = GpuopsStager()
    staged = stager.stage({"w": torch.ones(4)})
    stager.close()
    stager.close()
    assert staged["w"].sum() == 4


def test_async_save_with_writer_and_stager(store):
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", rank=0, world_size=1, init_method=f"file://{store.address}.rendezvous"
    )
    try:
        stager = GpuopsStager()
        live = state()
        futures = []
        for step in range(1, 6):
            futures.append(
                dcp.async_save(
                    live,
                    storage_writer=GpuopsWriter(store.address, step=step),
                    async_stager=stager,
                )
            )
            live["model"]["w"].add_(1)
        for future in futures:
            future.result(timeout=60)
    finally:
        dist.destroy_process_group()
    assert [stored.state.step for stored in store.list_states()] == [5, 4, 3, 2, 1]
    for step in range(1, 6):
        loaded = blank()
        dcp.load(loaded, storage_reader=GpuopsReader(store.address, step=step))
        assert torch.equal(loaded["model"]["w"], state()["model"]["w"] + step - 1)
    assert stager.n_created <= 2


# Several ranks.

JOB = """
    import json, os, sys, warnings
    warnings.simplefilter("ignore")
    import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from gpuops.worker.adapters.dcp import GpuopsReader, GpuopsStager, GpuopsWriter

    task = json.loads(sys.argv[1])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method="file://" + task["rendezvous"], rank=rank, world_size=world
    )
    torch.set_num_threads(1)
    place = {"rows": [Shard(0)], "columns": [Shard(1)], "all": [Replicate()]}
    shape = tuple(task.get("mesh", [world]))
    mesh = init_device_mesh("cpu", shape)
    if len(shape) == 2:
        place = {
            "rows": [Shard(0), Replicate()],
            "columns": [Shard(1), Shard(0)],
            "all": [Replicate()] * 2,
        }

    def made(fill):
        torch.manual_seed(4)
        whole = {
            "rows": torch.randn(7, 5),
            "columns": torch.randn(6, 9).bfloat16(),
            "all": torch.randn(3),
        }
        other = task.get("as", {})
        state = {
            name: distribute_tensor(tensor * fill, mesh, place[other.get(name, name)])
            for name, tensor in whole.items()
        }
        state["plain"] = torch.arange(4.0) * fill
        state["step"] = 5 * fill
        return state

    if "save" in task["do"]:
        if task.get("async"):
            future = dcp.async_save(made(1), storage_writer=GpuopsWriter(task["dir"], step=5),
                                    async_stager=GpuopsStager())
            future.result(timeout=60)
        else:
            dcp.save(made(1), storage_writer=GpuopsWriter(task["dir"], step=5))
    if "load" in task["do"]:
        into = made(0)
        dcp.load(into, storage_reader=GpuopsReader(task["dir"]))
        for name, tensor in made(1).items():
            mine = into[name]
            if hasattr(tensor, "to_local"):
                mine, tensor = mine.to_local(), tensor.to_local()
            same = mine == tensor if isinstance(tensor, int) else torch.equal(mine, tensor)
            assert same, name
    dist.destroy_process_group()
    # The mesh keeps gloo's threads. One that lets go of a tensor of the last collective while the
    # interpreter ends would end this process with SIGABRT: torch's affair, and not looked at here.
    sys.stdout.flush()
    os._exit(0)
"""


def ranks(tmp_path, world, task):
    rendezvous = tmp_path / f"rendezvous-{os.urandom(4).hex()}"
    task = json.dumps({"rendezvous": str(rendezvous), "dir": str(tmp_path / "s"), **task})
    started = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(JOB), task],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    said = [child.communicate(timeout=120)[0] for child in started]
    assert [child.returncode for child in started] == [0] * world, "\n".join(said)


def check_alone(store):
    """Load the state that the job saved into plain tensors, without any process group."""
    torch.manual_seed(4)
    whole = {
        "rows": torch.randn(7, 5),
        "columns": torch.randn(6, 9).bfloat16(),
        "all": torch.randn(3),
        "plain": torch.arange(4.0),
    }
    loaded = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    dcp.load(loaded, storage_reader=GpuopsReader(store.address))
    assert same(loaded, whole)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("world", "how"),
    [(2, {}), (4, {"mesh": [2, 2], "async": True})],
    ids=["rows-and-columns", "a-mesh-of-two-dimensions"],
)
def test_ranks_save_and_others_load(tmp_path, store, world, how):
    ranks(tmp_path, world, {"do": ["save", "load"], **how})
    (stored,) = store.list_states()

    assert stored.manifest.world == world
    assert verify_state(store, stored.state) == []
    assert [path.name for path in Path(store.address).iterdir()] == [stored.state.name]
    check_alone(store)
    if world == 2:  # other ranks, and other parts
        ranks(tmp_path, 3, {"do": ["load"], "as": {"rows": "columns"}})
