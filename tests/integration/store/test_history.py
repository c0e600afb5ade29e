"""Reading: what still waits is sent first, and a run directory alone is enough."""

import pytest
from support.stories import Teller, dump, story

from gpuops.errors import NetworkFilesystemError, StoreUnreachableError, UsageError
from gpuops.host.clock import SystemClock
from gpuops.store.history import load_journal, store_for_reading
from gpuops.store.queries import run_queries
from gpuops.store.spool.format import encode_line
from gpuops.store.spool.record import spool_recorder
from gpuops.store.spool.segments import find_segments

LINES = story(1)


def recorded(tmp_path, count=3, **changes):
    keeper = spool_recorder(
        tmp_path / "spool",
        node="n1",
        boot_id="b1",
        bytes_max=2**26,
        clock=SystemClock(),
        journal=tmp_path / "run" / "journal",
    )
    teller = Teller()
    for n in range(count):
        keeper.record(teller.event("attempt.progress", run_id="r1", attempt=0, minute_us=n))
    keeper.close()


def opened(tmp_path, **changes):
    wanted = {
        "url": f"sqlite:///{tmp_path}/state/store.db",
        "is_default": True,
        "spool_dir": tmp_path / "spool",
        "clock": SystemClock(),
        **changes,
    }
    return store_for_reading(wanted.pop("url"), **wanted)


def events(store):
    with store, store.begin() as connection:
        return run_queries.events(connection)


def network(tmp_path, point):
    info = tmp_path / "root" / "proc" / "self" / "mountinfo"
    info.parent.mkdir(parents=True)
    info.write_text(f"23 22 0:50 / {point} rw - nfs4 server:/export rw\n")
    return tmp_path / "root"


def test_a_machine_without_history_has_an_empty_one(tmp_path):
    store = opened(tmp_path)

    assert store.notes == ()
    assert events(store) == []
    assert list(tmp_path.iterdir()) == []


def test_what_waits_in_the_spool_is_shown(tmp_path):
    recorded(tmp_path)

    assert len(events(opened(tmp_path))) == 3
    assert find_segments(tmp_path / "spool") == []


def test_a_named_store_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(StoreUnreachableError, match="no such file"):
        opened(tmp_path, is_default=False)


def test_on_a_network_file_system_the_spool_itself_is_read_and_kept(tmp_path):
    recorded(tmp_path)
    root = network(tmp_path, tmp_path / "state")

    for _ in range(2):
        store = opened(tmp_path, root=root)
        assert "nfs4" in store.notes[0]
        assert len(events(store)) == 3
    assert len(find_segments(tmp_path / "spool")) == 1
    assert not (tmp_path / "state").exists()


def test_a_named_store_on_a_network_file_system_is_refused(tmp_path):
    root = network(tmp_path, tmp_path / "state")

    with pytest.raises(NetworkFilesystemError):
        opened(tmp_path, root=root, is_default=False)


def test_a_spool_that_cannot_be_sent_is_a_note(tmp_path):
    recorded(tmp_path)
    events(opened(tmp_path))
    recorded(tmp_path)
    (tmp_path / "spool" / ".flush.lock").unlink()
    (tmp_path / "spool" / ".flush.lock").mkdir()

    store = opened(tmp_path)

    assert "not shown" in store.notes[0]
    assert len(events(store)) == 3


def test_a_run_directory_alone_is_enough(tmp_path):
    recorded(tmp_path)

    with load_journal(tmp_path / "run" / "journal") as store, store.begin() as connection:
        run = run_queries.find_run(connection, None)
        (attempt,) = run_queries.attempts(connection, run.id)

    assert (run.id, attempt.ordinal) == ("r1", 0)


def test_a_journal_and_a_store_hold_the_same_rows(tmp_path):
    recorded(tmp_path)
    with opened(tmp_path) as store, store.begin() as connection:
        rows = dump(connection)

    with load_journal(tmp_path / "run" / "journal") as store, store.begin() as connection:
        assert dump(connection) == rows


def test_a_damaged_journal_shows_what_it_can(tmp_path):
    for line in LINES:
        path = tmp_path / f"{line.origin}.jsonl"
        with path.open("ab") as file:
            file.write(encode_line(line) + b"noise\n")
    (tmp_path / "README.jsonl").write_text("not a journal\n")

    with load_journal(tmp_path) as store, store.begin() as connection:
        assert len(run_queries.events(connection)) == len(LINES)
        assert run_queries.find_run(connection, None).cluster == "c1"
        assert f"{len(LINES)} lines" in store.notes[0]


def test_a_directory_without_a_journal_is_said(tmp_path):
    with pytest.raises(UsageError, match="no journal"):
        load_journal(tmp_path / "nowhere")
