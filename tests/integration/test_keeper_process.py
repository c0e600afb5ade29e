"""The keeper's process: what is killed around it, what is thrown at it, and when it ends."""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.keeper_ranks import (
    Rank,
    fill,
    holds,
    layout_of,
    newest,
    ready,
    save_all,
    until,
)

from gpuops.checkpoint.keeper.agent_client import KeeperClient
from gpuops.checkpoint.keeper.connection import KeeperConnection, KeeperGoneError
from gpuops.checkpoint.keeper.messages import MESSAGE_BYTES_MAX, CheckpointPolicy, Lease, Skipped
from gpuops.checkpoint.keeper.process import start_or_adopt
from gpuops.checkpoint.keeper.rank_client import FAST_CALL_S, NO_ANSWER, connect_rank
from gpuops.checkpoint.keeper.serve import LOG
from gpuops.checkpoint.types import KeeperError, Shard, StateId, Tier
from gpuops.worker.map_ahead import MappedImages

TESTS = str(Path(__file__).parents[1])
OWN_FDS = Path("/proc/self/fd")


@pytest.fixture
def stack():
    with contextlib.ExitStack() as found:
        yield found


@pytest.fixture
def keeper(tmp_path, stack):
    process = start_or_adopt(tmp_path / "keeper", lease_s=30.0)
    stack.callback(process.kill)
    return process


def line_of(stack, keeper, rank=0, world=1, generation=0, **kwargs):
    found = connect_rank(
        keeper.socket_path,
        rank=rank,
        world=world,
        local_rank=rank,
        local_world=world,
        generation=generation,
        **kwargs,
    )
    stack.callback(found.close)
    return found


def agent_of(stack, keeper):
    link = KeeperClient.connect(keeper.socket_path)
    stack.callback(link.close)
    return link


def crew_of(stack, keeper, n=1, generation=0, **kwargs):
    lines = [line_of(stack, keeper, rank, n, generation) for rank in range(n)]
    return ready(lines, **kwargs)


WRITER = """
    import sys
    sys.path.insert(0, sys.argv[1])
    from pathlib import Path
    from gpuops.checkpoint.keeper.rank_client import connect_rank
    import time
    from support.keeper_ranks import Rank
    from gpuops.checkpoint.keeper.messages import Lease

    rank, world = int(sys.argv[3]), int(sys.argv[4])
    keeper = connect_rank(Path(sys.argv[2]), rank=rank, world=world, local_rank=rank,
                          local_world=world, generation=int(sys.argv[5]))
    me = Rank(keeper, rank, world, n_floats=500_000)
    keeper.restore_point(60.0)
    me.reserve()
    step = 0
    while True:
        # In step with the other rank, as collectives keep those of a job.
        step = max(step + 1, int(time.monotonic() * 12))
        time.sleep(max(step / 12 - time.monotonic(), 0))
        answer = me.copy(step)
        if isinstance(answer, Lease):
            keeper.mark_written(answer)
"""


def start_writer(stack, keeper, rank, world, generation):
    """Start a rank in a process of its own that saves without end; return it."""
    argv = [sys.executable, "-c", textwrap.dedent(WRITER), TESTS, str(keeper.socket_path)]
    argv += [str(rank), str(world), str(generation)]
    process = stack.enter_context(subprocess.Popen(argv, stdout=subprocess.DEVNULL))
    stack.callback(process.kill)
    return process


def test_workers_killed_in_the_middle_of_copies_lose_nothing_committed(keeper, stack):
    agent = agent_of(stack, keeper)
    world, last = 2, None
    for generation in range(6):
        agent.begin_generation(generation, 1, None)
        writers = [start_writer(stack, keeper, rank, world, generation) for rank in range(world)]
        enough = agent.stats()["committed"] + 4 + generation
        until(lambda enough=enough: agent.stats()["committed"] >= enough, deadline_s=60)
        for writer in writers:
            writer.kill()
        for writer in writers:
            writer.wait()
        before = agent.stats()["newest"]
        agent.begin_generation(generation, 1, None)
        lines = [line_of(stack, keeper, rank, world, generation) for rank in range(world)]
        offers = [line.restore_point(30.0) for line in lines]

        assert offers[0] == offers[1]
        assert offers[0].tier is Tier.MEMORY
        assert [offers[0].state.epoch, offers[0].state.step] >= before
        assert last is None or offers[0].state > last
        last = offers[0].state
        for rank, line in enumerate(lines):
            layout = layout_of(rank, world, n_floats=500_000)
            with line.open_shard(offers[0], Shard(rank, world)) as shard:
                assert holds(shard, layout, last.step)
            line.close()


AGENT = """
    import sys
    sys.path.insert(0, sys.argv[1])
    from pathlib import Path
    from gpuops.checkpoint.keeper.process import start_or_adopt
    from gpuops.checkpoint.keeper.agent_client import KeeperClient
    process = start_or_adopt(Path(sys.argv[2]), lease_s=60.0)
    link = KeeperClient.connect(process.socket_path)
    link.begin_generation(3, 1, None, job="run")
    print(process.pid, flush=True)
    sys.stdin.read()
"""


def start_agent(stack, folder):
    argv = [sys.executable, "-c", textwrap.dedent(AGENT), TESTS, str(folder)]
    process = stack.enter_context(
        subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
    )
    stack.callback(process.kill)
    return process, int(process.stdout.readline())


def kill_pid(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_a_new_agent_adopts_the_keeper_of_a_killed_one_with_all_it_holds(tmp_path, stack):
    agent, pid = start_agent(stack, tmp_path / "keeper")
    stack.callback(kill_pid, pid)
    path = tmp_path / "keeper" / "keeper.sock"
    lines = []
    for rank in range(2):
        line = connect_rank(
            path, rank=rank, world=2, local_rank=rank, local_world=2, generation=3, deadline_s=30
        )
        stack.callback(line.close)
        lines.append(line)
    ranks = ready(lines)
    states = [save_all(ranks, 1), save_all(ranks, 2)]
    with pytest.raises(KeeperError, match=f"pid {pid}.*agent with pid {agent.pid}"):
        start_or_adopt(tmp_path / "keeper", lease_s=60.0)
    with pytest.raises(KeeperError, match="two agents"):
        KeeperClient.connect(path)
    # The whole session, as a launcher that is killed takes its group with it.
    os.killpg(agent.pid, signal.SIGKILL)
    agent.wait()
    until(lambda: ranks[0].keeper.stats()["agent"] is None)

    adopted = start_or_adopt(tmp_path / "keeper", lease_s=60.0)
    assert (adopted.pid, adopted.is_adopted, adopted.is_running()) == (pid, True, True)
    link = KeeperClient.connect(adopted.socket_path)
    stack.callback(link.close)
    copies = link.inventory()
    assert sorted({copy.state for copy in copies}) == states
    assert len(copies) == 4
    for copy in copies:
        layout = ranks[copy.shard.rank].layout
        image = memoryview(bytearray(layout.nbytes))
        fill(image, layout, copy.state.step)
        from gpuops.checkpoint.digest import compute_digest

        assert copy.digest == replace(compute_digest(image), table=b"")
        assert copy.layout == layout.header_hash
    link.shut_down()
    until(lambda: not adopted.is_running())


def test_a_rank_that_is_stopped_holds_up_nobody_but_itself(keeper, stack):
    agent = agent_of(stack, keeper)
    agent.begin_generation(0, 1, None)
    writers = [start_writer(stack, keeper, rank, 2, 0) for rank in range(2)]
    until(lambda: agent.stats()["committed"] > 3, deadline_s=60)
    os.kill(writers[1].pid, signal.SIGSTOP)
    stack.callback(writers[1].kill)
    at = time.monotonic()
    until(lambda: agent.stats()["skipped"].get("in_flight", 0) > 20, deadline_s=30)
    assert time.monotonic() - at < 30
    state = agent.stats()["newest"]
    # The agent gives up on it; new workers need not wait for the stopped one.
    agent.begin_generation(1, 1, None)
    ranks = [
        Rank(line_of(stack, keeper, rank, 2, 1), rank, 2, n_floats=500_000) for rank in range(2)
    ]
    offers = [rank.keeper.restore_point(30.0) for rank in ranks]
    assert [offers[0].state.epoch, offers[0].state.step] >= state
    os.kill(writers[1].pid, signal.SIGCONT)
    assert writers[1].wait(timeout=30) != 0  # its keeper has cut it off


def test_older_workers_are_cut_off_and_not_let_in_again(keeper, stack):
    agent = agent_of(stack, keeper)
    agent.begin_generation(4, 1, None)
    (old,) = crew_of(stack, keeper, generation=4)
    grant = old.copy(1)
    agent.begin_generation(5, 1, None)

    with pytest.raises(KeeperError):
        old.keeper.acquire(2)
    with pytest.raises(KeeperError, match="generation 4 is over"):
        line_of(stack, keeper, generation=4)
    with pytest.raises(KeeperError, match="generation 6 has not begun"):
        line_of(stack, keeper, generation=6)
    with pytest.raises(KeeperError, match="generation 4 is over"):
        agent.begin_generation(4, 1, None)
    # It still maps its slot and writes on; nothing of that counts.
    fill(old.slots[grant.slot].view, old.layout, 1)
    (new,) = crew_of(stack, keeper, generation=5)
    assert newest(new.keeper) is None


def test_without_an_agent_new_workers_take_over_from_old_ones(keeper, stack):
    old = crew_of(stack, keeper, 2)
    state = save_all(old, 1)
    for rank in old:
        rank.keeper.close()
    new = [line_of(stack, keeper, rank, 2) for rank in range(2)]

    assert [line.restore_point(30.0).state for line in new] == [state, state]


def test_a_rank_is_there_once(keeper, stack):
    line_of(stack, keeper, 0, 2)

    with pytest.raises(KeeperError, match="connected as local rank 0 already"):
        line_of(stack, keeper, 0, 2)
    with pytest.raises(KeeperError, match="both are rank 0"):
        connect_rank(keeper.socket_path, rank=0, world=2, local_rank=1, local_world=2)


def mapped_by(stack, keeper, rank, world=2):
    found = MappedImages(keeper.socket_path, rank=rank, world=world)
    stack.callback(found.close)
    found.wait()
    return found


def test_new_workers_map_what_they_will_load_before_they_are_ranks(keeper, stack):
    agent = agent_of(stack, keeper)
    agent.begin_generation(0, 1, None)
    too_early = mapped_by(stack, keeper, 0)
    ranks = crew_of(stack, keeper, 2)
    state = save_all(ranks, 1)
    agent.begin_generation(1, 1, None)
    mapped = mapped_by(stack, keeper, 1)
    others = [too_early, mapped_by(stack, keeper, 0), mapped_by(stack, keeper, 1, world=3)]

    new = [line_of(stack, keeper, rank, 2, generation=1) for rank in range(2)]
    point = [line.restore_point(30.0) for line in new][1]
    image = new[1].open_shard(point, Shard(1, 2))
    stack.callback(image.close)
    assert point.state == state
    assert [other.take(image) for other in others] == [None] * 3
    found = mapped.take(image)
    assert holds(found, ranks[1].layout, 1)
    with pytest.raises(TypeError, match="read-only"):
        found.view[0] = 1
    found.close()
    assert mapped.take(image) is None


def test_what_is_mapped_ahead_is_released_where_nobody_takes_it(keeper, stack, tmp_path):
    save_all(crew_of(stack, keeper), 1)
    n_open = len(list(OWN_FDS.iterdir()))
    mapped = mapped_by(stack, keeper, 0, world=1)
    assert len(list(OWN_FDS.iterdir())) > n_open
    mapped.close()
    late = MappedImages(keeper.socket_path, rank=0, world=1)
    late.close()
    late.wait()
    no_keeper = MappedImages(tmp_path / "keeper.sock", rank=0, world=1)
    no_keeper.wait()
    assert len(list(OWN_FDS.iterdir())) == n_open


def test_persisting_follows_the_policy_and_a_flush(keeper, stack, tmp_path):
    agent = agent_of(stack, keeper)
    agent.begin_generation(0, 1, None, job="run-1")
    directory = tmp_path / "states"
    ranks = crew_of(stack, keeper, 2, slots=3, directory=str(directory), keep_last=2)
    first = save_all(ranks, 1)
    until((directory / first.name / "manifest.json").exists)
    until(lambda: agent.stats()["persisted"] == [first.epoch, first.step])
    second = save_all(ranks, 2)
    assert not (directory / second.name).exists()  # 600 s have not passed
    flushed = agent.flush(30.0)

    assert flushed.state == second
    assert flushed.nbytes == 2 * ranks[0].layout.nbytes
    assert agent.flush(30.0).state == second
    third = save_all(ranks, 3)
    assert agent.flush(30.0).state == third
    # The oldest is removed after the answer to the flush.
    until(lambda: {path.name for path in directory.glob("step*")} == {second.name, third.name})
    kinds = [event["kind"] for event in agent.events()]
    assert kinds.count("persisted") == 3
    assert agent.stats()["persist_pieces"] >= 6  # of three states of two ranks
    manifest = json.loads((directory / third.name / "manifest.json").read_text())
    assert manifest["job"] == "run-1"


def test_a_directory_that_takes_nothing_costs_no_state_and_no_keeper(keeper, stack, tmp_path):
    agent = agent_of(stack, keeper)
    agent.begin_generation(0, 1, None)
    (rank,) = crew_of(stack, keeper, slots=3, directory=str(tmp_path / "file" / "states"))
    # It was made to say whose it is; then it is gone, and something else stands there.
    until((tmp_path / "file" / "states").exists)
    shutil.rmtree(tmp_path / "file")
    (tmp_path / "file").write_text("no directory")
    save_all([rank], 1)
    until(lambda: agent.stats()["persist_failures"] == 1)
    assert "file" in agent.stats()["persist_trouble"]
    assert save_all([rank], 2).step == 2
    assert agent.stats()["persist_failures"] == 1  # it is not tried again at once
    flushed = agent.flush(30.0)

    assert flushed.state is None
    assert "file" in flushed.why
    failed = [event for event in agent.events() if event["kind"] == "persist_failed"]
    assert len(failed) == 2
    assert failed[0]["again_s"] > 0


def test_a_flush_without_a_directory_or_a_state_says_so(keeper, stack):
    agent = agent_of(stack, keeper)
    assert agent.flush(5.0).why == "there is no committed state"
    agent.begin_generation(0, 1, None)
    (rank,) = crew_of(stack, keeper)
    save_all([rank], 1)

    assert agent.flush(5.0).why == "no directory for checkpoints is set"


def test_the_agent_hears_what_happened(keeper, stack):
    agent = agent_of(stack, keeper)
    agent.begin_generation(0, 1, None)
    ranks = crew_of(stack, keeper, 2)
    for step in range(1, 8):
        save_all(ranks, step)
    ranks[0].copy(8)
    ranks[0].keeper.acquire(9)
    events = agent.events()

    committed = [event for event in events if event["kind"] == "committed"]
    assert sum(event["n"] for event in committed) == 7
    assert committed[-1]["state"][1] == 7
    assert committed[-1]["bytes"] == 2 * ranks[0].layout.nbytes
    assert [event["n"] for event in events if event["kind"] == "skipped"] == [1]
    assert agent.events() == []
    agent.begin_generation(1, 1, None)
    lines = [line_of(stack, keeper, rank, 2, 1) for rank in range(2)]
    offer = lines[0].restore_point(30.0)
    lines[0].report_restored(offer, 0.25, 1234)
    events = {event["kind"]: event for event in agent.events()}
    assert events["offered"]["tier"] == "memory"
    assert events["restored"]["bytes"] == 1234
    assert events["restored"]["seconds"] == 0.25
    assert "kind=restored" in (keeper.socket_path.parent / LOG).read_text()


def test_several_nodes_commit_and_choose_together(keeper, stack, tmp_path):
    agent = agent_of(stack, keeper)
    agent.begin_generation(0, 2, None, job="run")
    lines = [
        connect_rank(keeper.socket_path, rank=2 + n, world=4, local_rank=n, local_world=2)
        for n in range(2)
    ]
    for line in lines:
        stack.callback(line.close)
    ranks = [Rank(line, 2 + n, 4, directory=str(tmp_path)) for n, line in enumerate(lines)]
    asked = threading.Thread(target=lambda: ranks[0].keeper.restore_point(60.0))
    asked.start()
    agent.restore_from(None, 7)
    asked.join()
    assert all(rank.keeper.restore_point(30.0) is None for rank in ranks)
    for rank in ranks:
        rank.reserve()
    for rank in ranks:
        rank.save(1)
    state = StateId(7, 1)
    until(lambda: len(agent.inventory()) == 2)
    assert agent.stats()["newest"] is None
    assert agent.commit(state, persist=True)
    assert agent.stats()["newest"] == [7, 1]
    until(lambda: any(event["kind"] == "persisted_part" for event in agent.events()))
    with pytest.raises(KeeperError, match="already decided"):
        agent.restore_from(state, 8)
    agent.begin_generation(1, 2, None)
    agent.restore_from(state, 8)
    lines = [
        connect_rank(
            keeper.socket_path, rank=2 + n, world=4, local_rank=n, local_world=2, generation=1
        )
        for n in range(2)
    ]
    for line in lines:
        stack.callback(line.close)
    offers = [line.restore_point(30.0) for line in lines]
    assert (offers[0].state, offers[0].epoch, offers[0].tier) == (state, 8, Tier.MEMORY)
    assert offers[0] == offers[1]


# Hostile neighbours of the same user.


def raw(keeper):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(10)
    folder = os.open(keeper.socket_path.parent, os.O_PATH)
    try:
        sock.connect(f"/proc/self/fd/{folder}/{keeper.socket_path.name}")
    except OSError:
        sock.close()
        raise
    finally:
        os.close(folder)
    return sock


def hello(keeper, **fields):
    sock = raw(keeper)
    sock.send(json.dumps({"v": 1, "id": 1, "what": "hello", **fields}).encode())
    sock.recv(MESSAGE_BYTES_MAX)
    return sock


RANK = {"role": "rank", "rank": [[0, 1], 0, 1, 0]}
WORDS = ["hello", "reserve", "begin", "seal", "abandon", "offer", "open_shard", "restored"]
WORDS += ["settings", "stats", "choose", "commit", "inventory", "sources", "events", "flush", "x"]
NAMES = ["step", "state", "shard", "slots", "nbytes", "layout", "policy", "deadline_s", "epoch"]
NAMES += ["role", "rank", "generation", "seconds", "nbytes", "peers", "shards", "is_last"]
VALUES = [None, True, -1, 0, 1, 2, 2**31, 2**63, 10**30, 0.5, 1e308, "", "a" * 64, "\0", "é" * 99]
VALUES += [
    [],
    [0, 0],
    [0, 1],
    [1, 0],
    [[1, 2], 1, 2, 0],
    [2**70, 1],
    ["a", 1],
    {},
    {"directory": 1},
    [[[[]]]],
]


def garbage(random_):
    kind = random_.randrange(6)
    if kind == 0:
        return random_.randbytes(random_.randrange(1, 300))
    if kind == 1:
        return b"[" * random_.randrange(1, MESSAGE_BYTES_MAX)
    if kind == 2:
        return b'{"v":1,"id":' + b"9" * random_.randrange(1, 9000) + b"}"
    fields = {name: random_.choice(VALUES) for name in random_.sample(NAMES, 6)}
    message = {"v": 1, "id": random_.choice([0, 1, 2]), "what": random_.choice(WORDS), **fields}
    if kind == 3:
        message["v"] = random_.choice(VALUES)
    return json.dumps(message).encode()


def test_garbage_never_ends_the_keeper_and_loses_no_state(keeper, stack):
    (rank,) = crew_of(stack, keeper, n_floats=50)
    state = save_all([rank], 1)
    rank.keeper.close()
    seed = random.SystemRandom().randrange(2**32)
    random_ = random.Random(seed)
    for number in range(120):
        role = random_.choice([None, {"role": "probe"}, {"role": "agent"}, RANK])
        with raw(keeper) if role is None else hello(keeper, **role) as sock:
            for _ in range(random_.randrange(1, 12)):
                with contextlib.suppress(OSError):
                    sock.send(garbage(random_))
                    if random_.random() < 0.5:
                        sock.settimeout(0.05)
                        sock.recv(MESSAGE_BYTES_MAX)
        assert keeper.is_running(), f"seed {seed}, connection {number}"
    line = until(lambda: patient_line(stack, keeper), deadline_s=30)
    assert line.stats()["committed"] >= 1, f"seed {seed}"
    offer = line.restore_point(30.0)
    # Who speaks as a rank may begin a state anew, but not make one up.
    assert offer is None or offer.state >= state, f"seed {seed}"


def patient_line(stack, keeper):
    with contextlib.suppress(KeeperError):
        return line_of(stack, keeper)
    return None


def n_files(pid):
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def test_descriptors_that_nobody_asked_for_and_answers_nobody_reads_leave_nothing(keeper, stack):
    line_of(stack, keeper).stats()
    before = n_files(keeper.pid)
    for number in range(20):
        with hello(keeper, role="probe") as sock:
            data = json.dumps({"v": 1, "id": 1, "what": "stats"}).encode()
            read, write = os.pipe()
            socket.send_fds(sock, [data], [read, write, read])
            os.close(read)
            os.close(write)
            for _ in range(number):
                with contextlib.suppress(OSError):
                    sock.setblocking(False)
                    sock.send(data)
    # An answer with slots to a question that wants none.
    with hello(keeper, **RANK | {"rank": [[1, 2], 1, 2, 0]}) as sock:
        layout = layout_of(1, 2)
        fields = {"layout": layout.header_hash, "nbytes": layout.nbytes, "slots": 2}
        for _ in range(30):
            sock.send(json.dumps({"v": 1, "id": 0, "what": "reserve", **fields}).encode())
        until(lambda: n_files(keeper.pid) <= before + 10, deadline_s=15)
    until(lambda: n_files(keeper.pid) <= before + 6, deadline_s=15)


def test_a_message_that_is_too_long_ends_its_connection_only(keeper, stack):
    line = line_of(stack, keeper)
    with hello(keeper, role="probe") as sock:
        sock.send(b"x" * (MESSAGE_BYTES_MAX + 1))
        answer = json.loads(sock.recv(MESSAGE_BYTES_MAX))
        assert "more than" in answer["error"]
        assert sock.recv(10) == b""
    assert line.stats()["ranks"] == 1


def test_another_version_is_told_so(keeper):
    with raw(keeper) as sock:
        sock.send(json.dumps({"v": 2, "id": 1, "what": "hello"}).encode())
        assert "same release" in json.loads(sock.recv(MESSAGE_BYTES_MAX))["error"]


def test_too_many_connections_do_not_keep_out_those_that_are_served(keeper, stack):
    (rank,) = crew_of(stack, keeper)
    crowd = []
    for _ in range(300):
        with contextlib.suppress(OSError):
            crowd.append(stack.enter_context(raw(keeper)))
    assert save_all([rank], 1).step == 1
    for sock in crowd:
        sock.close()
    probe = until(lambda: patient_agent(stack, keeper), deadline_s=30)
    assert probe.stats()["committed"] == 1


def patient_agent(stack, keeper):
    with contextlib.suppress(KeeperError):
        return agent_of(stack, keeper)
    return None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_is_refused_even_where_the_socket_is_open_to_all(stack):
    import tempfile

    # Not below a directory of pytest's, which others cannot enter.
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    keeper = start_or_adopt(folder / "keeper", lease_s=30.0)
    stack.callback(keeper.kill)
    (keeper.socket_path.parent).chmod(0o755)
    folder.chmod(0o755)
    keeper.socket_path.chmod(0o666)
    script = (
        "import socket,sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET);"
        f"s.connect({str(keeper.socket_path)!r}); print(s.recv(65536).decode())"
    )
    setpriv = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    found = subprocess.run(
        [*setpriv, shutil.which("python3", path="/usr/bin:/bin") or sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert "this keeper serves uid 0, not 65534" in found.stdout, found.stderr


# How it begins and ends.


def test_signals_for_the_whole_job_leave_it_until_the_agent_is_gone(keeper, stack):
    agent = agent_of(stack, keeper)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
        os.kill(keeper.pid, number)
    assert agent.stats()["committed"] == 0
    agent.close()

    until(lambda: not keeper.is_running(), deadline_s=15)


def test_it_ends_when_nobody_comes_back_within_the_lease(tmp_path, stack):
    keeper = start_or_adopt(tmp_path / "keeper", lease_s=1.0)
    stack.callback(keeper.kill)
    line = line_of(stack, keeper)
    time.monotonic()
    until(lambda: line.stats()["ranks"] == 1)
    line.close()

    until(lambda: not keeper.is_running(), deadline_s=20)
    with pytest.raises(KeeperGoneError):
        KeeperConnection(keeper.socket_path)


@pytest.mark.parametrize("number", [None, signal.SIGTERM])
def test_what_only_memory_has_is_persisted_before_it_ends(tmp_path, stack, number):
    """Also if that failed before, and if all processes of a job without an agent are ended."""
    keeper = start_or_adopt(tmp_path / "keeper", lease_s=600.0 if number else 1.0)
    stack.callback(keeper.kill)
    states = tmp_path / "states"
    (rank,) = crew_of(stack, keeper, directory=str(states))
    states.rename(tmp_path / "away")
    states.touch()
    state = save_all([rank], 1)
    until(lambda: rank.keeper.stats()["persist_failed"] == [state.epoch, state.step])
    states.unlink()
    (tmp_path / "away").rename(states)
    if number is not None:
        os.kill(keeper.pid, number)
    rank.keeper.close()

    until(lambda: not keeper.is_running(), deadline_s=30)
    assert (states / state.name / "manifest.json").exists()


def test_two_starts_at_once_share_one_keeper(tmp_path, stack):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(start_or_adopt(tmp_path / "k", lease_s=20.0)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for process in found:
        stack.callback(process.kill)

    assert len({process.pid for process in found}) == 1
    assert [process.is_adopted for process in found].count(False) == 1


def test_a_folder_with_a_name_longer_than_an_address_can_be(tmp_path, stack):
    folder = tmp_path / ("d" * 120) / ("e" * 120)
    keeper = start_or_adopt(folder, lease_s=20.0)
    stack.callback(keeper.kill)

    assert newest(line_of(stack, keeper)) is None


def test_a_folder_that_others_may_write_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)

    with pytest.raises(KeeperError, match="other users may write"):
        start_or_adopt(tmp_path / "open", lease_s=20.0)


def test_what_a_dead_keeper_left_is_no_hindrance(tmp_path, stack):
    first = start_or_adopt(tmp_path / "keeper", lease_s=20.0)
    first.kill()
    assert first.socket_path.exists()
    second = start_or_adopt(tmp_path / "keeper", lease_s=20.0)
    stack.callback(second.kill)

    assert not second.is_adopted
    assert newest(line_of(stack, second)) is None


def test_a_keeper_that_is_stopped_is_an_error_within_the_deadline(keeper, stack):
    line = line_of(stack, keeper)
    line._connection._deadline_s = 0.5
    os.kill(keeper.pid, signal.SIGSTOP)
    with pytest.raises(KeeperError, match="does not answer"):
        line.set_policy(CheckpointPolicy())
    with pytest.raises(KeeperError, match="is closed"):
        line.acquire(2)
    os.kill(keeper.pid, signal.SIGCONT)


def test_a_rank_that_trains_skips_while_a_keeper_is_stopped_and_goes_on_after(keeper, stack):
    """Of two ranks one is granted a step too late; neither waits again before it is answered."""
    ranks = crew_of(stack, keeper, 2)
    state = save_all(ranks, 1)
    os.kill(keeper.pid, signal.SIGSTOP)
    began_s = time.monotonic()
    answers = [rank.keeper.acquire(2) for rank in ranks]
    first_s = time.monotonic() - began_s
    began_s = time.monotonic()
    for step in range(3, 2003):
        answers += [rank.keeper.acquire(step) for rank in ranks]
    assert time.monotonic() - began_s < 2000 * FAST_CALL_S
    assert first_s >= FAST_CALL_S
    assert set(answers) == {Skipped(NO_ANSWER)}
    with pytest.raises(KeeperError, match="has not answered yet"):
        ranks[0].keeper.stats()
    os.kill(keeper.pid, signal.SIGCONT)

    # What it grants of step 2 by now is too late, and is given back for both.
    steps = itertools.count(2003)
    until(lambda: not silent([rank.save(next(steps)) for rank in ranks[:1]]))
    until(lambda: not silent([rank.save(next(steps)) for rank in ranks[1:]]))
    saved = until(lambda: granted([rank.save(n) for n in [next(steps)] for rank in ranks]))
    assert saved > state
    until(lambda: ranks[0].keeper.stats()["newest"] == [saved.epoch, saved.step])


def silent(answers):
    return Skipped(NO_ANSWER) in answers


def granted(answers):
    """Return the state that all were granted, None where some were not."""
    states = {answer.state for answer in answers if isinstance(answer, Lease)}
    return states.pop() if len(states) == 1 and len(answers) == 2 else None


def test_a_killed_keeper_is_an_error_and_its_memory_stays_with_who_maps_it(keeper, stack):
    (rank,) = crew_of(stack, keeper)
    grant = rank.copy(1)
    assert isinstance(grant, Lease)
    keeper.kill()

    with pytest.raises(KeeperError):
        until(lambda: rank.keeper.acquire(2) and False)
    assert holds(rank.slots[grant.slot], rank.layout, 1)


def test_ranks_that_run_go_on_saving_into_a_keeper_in_place_of_one_that_died(
    keeper, stack, tmp_path
):
    agent = agent_of(stack, keeper)
    agent.begin_generation(4, 1, None)
    lines = [line_of(stack, keeper, rank, 2, 4) for rank in range(2)]
    place = str(tmp_path / "states")
    ranks = ready(lines, directory=place, persist_every_s=0.0)
    save_all(ranks, 7)
    until(lambda: agent.stats()["persisted"] == [0, 7])
    epoch = agent.stats()["epoch"]
    keeper.kill()

    second = start_or_adopt(tmp_path / "keeper", lease_s=30.0)
    stack.callback(second.kill)
    agent = agent_of(stack, second)
    agent.begin_generation(4, 1, None)
    agent.take_over(epoch)
    lines = [line_of(stack, second, rank, 2, 4, is_reconnect=True) for rank in range(2)]
    again = [Rank(line, n, 2, directory=place) for n, line in enumerate(lines)]
    ranks = [rank.reserve() for rank in again]
    # Nothing is read of what persists: the first step that is asked for is saved.
    assert save_all(ranks, 8) == StateId(epoch, 8)
    assert "took_over" in [event["kind"] for event in agent.events()]
    with pytest.raises(KeeperError, match="decided the state to resume from for this generation"):
        lines[1].restore_point(5.0)
    agent.begin_generation(5, 1, None)
    (fresh,) = crew_of(stack, second, generation=5)
    assert fresh.keeper.restore_point(30.0).state == StateId(epoch, 8)


def test_a_rank_whose_line_broke_comes_back_and_nobody_begins_anew(keeper, stack):
    ranks = crew_of(stack, keeper, 2)
    state = save_all(ranks, 3)
    ranks[1].keeper.close()
    back = Rank(line_of(stack, keeper, 1, 2, is_reconnect=True), 1, 2).reserve()
    assert save_all([ranks[0], back], 4) == StateId(state.epoch, 4)
    # One that does not say so is a worker that was started anew, and so are all.
    back.keeper.close()
    line_of(stack, keeper, 1, 2)
    with pytest.raises(KeeperError):
        ranks[0].keeper.stats()


def test_neither_torch_nor_numpy_is_in_it(keeper):
    maps = Path(f"/proc/{keeper.pid}/maps").read_text()

    assert "torch" not in maps
    assert "numpy" not in maps
