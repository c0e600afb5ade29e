"""A sharded job goes on with another number of ranks, from memory, with the very same state."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.gloo_ranks import results_of, run_ranks, run_script, said
from support.keeper_ranks import until
from support.peer_keepers import starting_nodes
from support.runs import JOBS
from support.same_state import same

from gpuops.checkpoint.image import read_layout, read_metadata_blob
from gpuops.checkpoint.keeper.process import start_or_adopt
from gpuops.checkpoint.pieces import PIECE_BYTES
from gpuops.checkpoint.storage.address import open_store
from gpuops.checkpoint.types import Shard, StateId

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]
STEPS = 3


@pytest.fixture
def keeper_process(tmp_path):
    process = start_or_adopt(tmp_path / "keeper", lease_s=600)
    yield process
    process.kill()


@pytest.fixture
def keeper(keeper_process):
    return keeper_process.socket_path


@pytest.mark.parametrize(
    ("before", "after"),
    [(("fsdp", 4), ("fsdp", 3)), (("fsdp", 2), ("fsdp", 4)), (("ddp", 2), ("plain", 1))],
    ids=["fsdp 4 to 3", "fsdp 2 to 4", "ddp 2 to plain"],
)
def test_another_world_goes_on_from_the_same_state(tmp_path, keeper, before, after):
    kind, world = before
    job = {"kind": kind, "name": "first", "until": STEPS, "die": True}
    saved = run_ranks(tmp_path, world, job, keeper=keeper)
    kind, world = after
    job = {"kind": kind, "name": "second", "until": STEPS + 2}
    loaded = run_ranks(tmp_path, world, job, keeper=keeper)

    for rank in range(world):
        assert loaded[rank]["start"] == STEPS, said(tmp_path, world, "second")
        assert loaded[rank]["restored"]["world"] == before[1]
        assert loaded[rank]["restored"]["tier"] == "memory"
        assert loaded[rank]["tokens"] == 10 * STEPS
        assert same(loaded[rank]["loaded"], saved[0]["state"])
        assert len(loaded[rank]["losses"]) == 2
    assert "seeded anew" in said(tmp_path, world, "second")


def place(node, generation, n_nodes, state, sources=None, world=None):
    node.acquire(generation, n_nodes)
    node.agent.replicate([])
    node.agent.restore_from(state, generation, sources, loading_world=world)


def test_another_world_reads_its_parts_from_the_memory_of_other_nodes(tmp_path):
    """Four ranks on two nodes become three, and one of them is on a node that has nothing."""
    job = {"kind": "fsdp", "width": 20_000, "until": 1, "every": 1}
    with starting_nodes(tmp_path) as start, ThreadPoolExecutor() as pool:
        first, second, new = map(start, (1, 2, 3))
        sockets = {node: node.process.socket_path for node in (first, second, new)}
        for node in (first, second):
            place(node, 0, 2, None)
        nodes = [(sockets[first], 2), (sockets[second], 2)]
        saving = pool.submit(
            run_ranks, tmp_path, 4, job | {"name": "first", "die": True}, nodes=nodes
        )
        state = StateId(0, 1)
        until(
            lambda: (
                saving.done()
                or all(state in n.agent.status().progress.whole for n in (first, second))
            ),
            what="a complete state",
        )
        for node in (first, second):
            node.agent.commit(state)
        saved = saving.result()

        holders = {Shard(rank, 4): [(first if rank < 2 else second).peer] for rank in range(4)}
        for node in (first, second, new):
            place(node, 1, 3, state, holders, 3)
        loaded = run_ranks(
            tmp_path,
            3,
            job | {"name": "second"},
            env={"GPUOPS_GENERATION": "1"},
            nodes=[(sockets[first], 2), (sockets[new], 1)],
        )
        fetched = {
            node: sum(event["bytes"] for event in node.heard_of("fetched")) for node in (first, new)
        }

    for rank in range(3):
        assert loaded[rank]["restored"]["world"] == 4
        assert loaded[rank]["restored"]["tier"] == "peer"
        assert same(loaded[rank]["loaded"], saved[0]["state"]), said(tmp_path, 3, "second")
    # A third of the rows of `up`, five numbers and a bias, and the last of the five of `down`.
    rows, item_bytes, header_bytes = 12 * job["width"], 3 * 4, 4 * 3 * PIECE_BYTES
    new_bytes = item_bytes * (rows // 3 * 6 + rows)
    # It has half of the rows of `up` and four of `down`, and loads two thirds and these.
    missing_bytes = item_bytes * rows // 6 * 6
    assert new_bytes <= fetched[new] <= 1.1 * new_bytes + header_bytes
    assert missing_bytes <= fetched[first] <= 1.1 * missing_bytes + header_bytes


def damage(pid, name, step):
    """Flip a bit of a tensor in the slot called *name* of the keeper *pid* that has *step*."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if not str(link.readlink()).startswith(f"/memfd:{name}-"):
            continue
        with link.open("r+b") as file:
            image = file.read()
            layout = read_layout(image)
            if json.loads(read_metadata_blob(memoryview(image), layout))["step"] == step:
                at = layout.tensors[0].begin
                file.seek(at)
                file.write(bytes([image[at] ^ 1]))
                return
    raise AssertionError("it has no such state")


def test_where_one_rank_finds_its_memory_damaged_all_load_the_state_before(
    tmp_path, keeper_process
):
    """Though the other one has read the newer state by then."""
    job, keeper = {"kind": "fsdp", "every": 1}, keeper_process.socket_path
    before = run_ranks(tmp_path, 2, job | {"name": "one", "until": 1, "die": True}, keeper=keeper)
    run_ranks(tmp_path, 2, job | {"name": "two", "until": 2, "die": True}, keeper=keeper)
    damage(keeper_process.pid, "gpuops-1-of-2", 2)
    loaded = run_ranks(tmp_path, 2, job | {"name": "three", "until": 2}, keeper=keeper)

    words = said(tmp_path, 2, "three")
    assert [each["restored"]["step"] for each in loaded] == [1, 1], words
    for after, was in zip(loaded, before, strict=True):
        assert same(after["loaded"], was["state"])
    assert "step 2" in words
    assert "corrupt in 1 of 1 pieces" in words


@pytest.fixture
def other_keeper(tmp_path):
    """The keeper of a job that starts anew: nothing is in its memory."""
    process = start_or_adopt(tmp_path / "other", lease_s=600)
    yield process.socket_path
    process.kill()


@pytest.mark.parametrize(
    ("kind", "before", "after"), [("fsdp", 4, 3), ("hsdp", 4, 2), ("tp", 4, 2)]
)
def test_another_world_reads_its_parts_from_the_directory(
    tmp_path, keeper, other_keeper, kind, before, after
):
    """Also where the newest state is damaged in a part that one rank reads: all load an older."""
    directory = str(tmp_path / "states")
    job = {"kind": kind, "directory": directory, "persist_every": 0, "every": 1}
    # One save: of several, the last is skipped where the first are still being written.
    first = {"name": "first", "until": STEPS, "every": STEPS, "die": True}
    saved = run_ranks(tmp_path, before, job | first, keeper=keeper)
    store = open_store(directory)
    until(lambda: [s.state.step for s in store.list_states()][:1] == [STEPS], what="persisting")

    loaded = run_ranks(
        tmp_path, after, job | {"name": "second", "until": STEPS + 2}, keeper=other_keeper
    )

    for rank in range(after):
        assert loaded[rank]["restored"]["world"] == before
        assert loaded[rank]["restored"]["tier"] == "persistent"
        assert same(loaded[rank]["loaded"], saved[0]["state"]), said(tmp_path, after, "second")

    # Its keeper lives: if it found the damage while reading back, it would write the state again.
    state = until(
        lambda: next(
            (s.state for s in store.list_states() if s.state.step == STEPS + 2 and s.is_verified),
            None,
        ),
        what="reading back",
    )
    spoil(store.local_shard_path(state, Shard(after - 1, after)))  # some rank reads of each tensor
    again = run_ranks(tmp_path, before, job | {"name": "third", "until": STEPS + 4})
    for rank in range(before):
        assert again[rank]["start"] < STEPS + 2
        assert again[rank]["restored"]["step"] == again[0]["restored"]["step"]
    assert "corrupt in piece" in said(tmp_path, before, "third")


def spoil(path):
    """Flip a bit in each tensor of a stored shard."""
    data = bytearray(path.read_bytes())
    for placed in read_layout(bytes(data)).tensors:
        if placed.begin < placed.end:
            data[placed.begin] ^= 1
    path.write_bytes(data)


def test_several_nodes_that_agreed_on_a_damaged_state_all_load_the_one_before(
    tmp_path, keeper_process
):
    """Also where only one node reads what is damaged."""
    directory = str(tmp_path / "states")
    job = {"kind": "fsdp", "directory": directory, "persist_every": 0, "every": 1}
    store = open_store(directory)
    for step in (1, 2):  # two jobs: of two saves, one is skipped while the other is being written
        first = {"name": f"saves {step}", "until": step, "die": True}
        run_ranks(tmp_path, 2, job | first, keeper=keeper_process.socket_path)
        until(lambda n=step: [s.state.step for s in store.list_states()][:1] == [n], what="a state")
    before = results_of(tmp_path, 2, {"name": "saves 1"})
    newest = store.list_states()[0].state
    keeper_process.kill()  # it would find the damage while reading back, and write the state again
    spoil(store.local_shard_path(newest, Shard(1, 2)))

    with starting_nodes(tmp_path) as start:
        nodes = [start(number) for number in (1, 2)]
        sockets = [node.process.socket_path for node in nodes]

        for name, generation, counts in (("same", 2, (1, 1)), ("other", 3, (2, 1))):
            world = sum(counts)
            for node in nodes:
                place(node, generation, 2, newest, world=world)
            results = run_ranks(
                tmp_path,
                world,
                job | {"name": name, "until": 1},
                env={"GPUOPS_GENERATION": str(generation)},
                nodes=list(zip(sockets, counts, strict=True)),
            )
            for rank, loaded in enumerate(results):
                assert loaded["restored"]["step"] == 1
                assert same(loaded["loaded"], before[rank if world == 2 else 0]["state"])
            assert "step 2" in said(tmp_path, world, name)


def test_ranks_with_a_keeper_and_without_one_load_nothing_and_all_say_why(tmp_path, keeper):
    """What they compare then is not the same numbers, which ends gloo by SIGABRT."""
    env = {"GPUOPS_KEEPER": str(keeper), "GPUOPS_CKPT_DIR": str(tmp_path / "states")}
    codes = run_script(tmp_path, 2, JOBS / "one_without_keeper.py", "mixed", env=env)
    words = said(tmp_path, 2, "mixed")

    assert codes == [0, 0], words
    assert words.count("refused: the ranks resume from different sources: some from the dir") == 2
    assert "this one (rank 0) from the keeper of the node" in words
    assert "this one (rank 1) from the directory" in words
