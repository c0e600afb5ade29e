"""Migrations, up and down with data, on both databases."""

import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import insert, inspect, select, text
from support.stories import dump, envelopes, story

from gpuops.errors import (
    EXIT_OK,
    EXIT_TRY_LATER,
    SchemaMismatchError,
    StoreUnreachableError,
)
from gpuops.host.clock import SystemClock
from gpuops.store.backends import connect_engine, parse_url
from gpuops.store.engine import IncidentStore, memory_store, open_store, read_revision
from gpuops.store.ingest.batch import ingest, rebuild_projections
from gpuops.store.migrate import alembic_config, upgrade, upgrade_store
from gpuops.store.queries import run_queries
from gpuops.store.schema import REVISION, metadata
from gpuops.store.spool.record import spool_recorder
from gpuops.store.spool.send import flush


@pytest.fixture
def url(empty_store_url):
    return empty_store_url


def filled(url):
    upgrade_store(url)
    with open_store(url, mode="write") as store, store.begin() as connection:
        ingest(connection, envelopes(story(1)), 1)
        return dump(connection)


def downgrade(url, revision):
    with open_store(url, mode="write") as store, store.begin() as connection:
        command.downgrade(alembic_config(connection), revision)


def test_an_empty_store_gets_its_tables_and_a_second_upgrade_does_nothing(url):
    assert upgrade_store(url) == (None, REVISION)
    assert upgrade_store(url) == (REVISION, REVISION)


def test_migrations_make_exactly_the_tables_of_the_code(url):
    upgrade_store(url)

    with open_store(url, mode="write") as store, store.begin() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})

        assert compare_metadata(context, metadata) == []


def test_an_empty_sqlite_store_is_made_as_the_migrations_make_it(tmp_path):
    """A failing prolog has one second for its permit, which Alembic alone takes on a busy node."""

    def made(name, make):
        url = f"sqlite:///{tmp_path}/{name}"
        make(url)
        with open_store(url, mode="read") as store, store.begin() as connection:
            found = inspect(connection)
            return read_revision(connection)[0], {
                table: (
                    {column["name"]: str(column["type"]) for column in found.get_columns(table)},
                    sorted(index["name"] for index in found.get_indexes(table)),
                )
                for table in (*found.get_table_names(), *found.get_view_names())
            }

    code = "import sys; from gpuops.store.engine import open_store\n"
    code += "open_store(sys.argv[1], mode='write'); assert 'alembic' not in sys.modules"

    def open_first(url):
        subprocess.run([sys.executable, "-c", code, url], check=True, timeout=60)

    assert made("opened.db", open_first) == made("upgraded.db", upgrade_store)


def test_down_and_up_with_data(url):
    before = filled(url)
    downgrade(url, "base")
    upgrade_store(url)

    with open_store(url, mode="write") as store, store.begin() as connection:
        assert dump(connection)["events"] == []
        ingest(connection, envelopes(story(1)), 2)
        assert dump(connection) == before


def test_several_upgrades_at_once_are_one(url):
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: upgrade_store(url), range(4)))

    assert sorted(before or "" for before, _ in results) == ["", REVISION, REVISION, REVISION]


def test_a_sqlite_store_that_holds_something_is_copied_first(tmp_path):
    url = f"sqlite:///{tmp_path}/store.db"
    filled(url)
    _pretend(url, "0000")

    with pytest.raises(SchemaMismatchError, match=r"cannot upgrade the store .*0000"):
        upgrade_store(url)

    copy = tmp_path / "store.db.before-upgrade-from-0000"
    with sqlite3.connect(copy) as connection:
        assert connection.execute("SELECT count(*) FROM events").fetchone()[0] > 0
    connection.close()


def test_without_room_for_the_copy_nothing_is_upgraded(tmp_path):
    url = f"sqlite:///{tmp_path}/store.db"
    filled(url)
    _pretend(url, "0000")
    (tmp_path / "store.db.before-upgrade-from-0000.part").mkdir()

    with pytest.raises((StoreUnreachableError, OSError)):
        upgrade_store(url)


def _pretend(url, revision):
    with open_store(url, mode="write") as store, store.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :r"), {"r": revision})


def test_an_older_schema_is_refused_with_the_command(url):
    filled(url)
    _pretend(url, "0000")

    for mode in ("read", "write"):
        with pytest.raises(SchemaMismatchError, match=r"older gpuops.*0000.*`gpuops db upgrade`"):
            open_store(url, mode=mode)


def test_a_newer_hook_spools_until_an_older_store_is_upgraded(url, tmp_path):
    upgrade_store(url)
    downgrade(url, "0001")
    spool = tmp_path / "spool"
    keeper = spool_recorder(spool, node="n1", boot_id="b1", bytes_max=2**26, clock=SystemClock())
    keeper.record(*(line.event for line in story(1)))
    keeper.close()

    before = flush(spool, url, clock=SystemClock())
    upgrade_store(url)
    after = flush(spool, url, clock=SystemClock())

    assert (before.sent, before.remaining) == (0, len(story(1)))
    assert "`gpuops db upgrade`" in before.note
    assert (after.sent, after.remaining, after.refused) == (len(story(1)), 0, 0)


@pytest.mark.parametrize("revision", ["0002", "0003", "0999"])  # two of pre-releases, a newer one
def test_an_unknown_schema_is_read_with_a_note_and_never_written(url, revision):
    before = filled(url)
    _pretend(url, revision)

    what = rf"has schema revision {revision}, which this gpuops \(revision {REVISION}\) does not"
    advice = r"upgrade gpuops here, else name a new store"
    with pytest.raises(SchemaMismatchError, match=rf"{what}.*nothing is written.*{advice}"):
        open_store(url, mode="write")
    with pytest.raises(SchemaMismatchError, match=rf"{what}.*a newer one or a pre-.*{advice}"):
        upgrade_store(url)
    with open_store(url, mode="read") as store, store.begin() as connection:
        assert f"revision {revision}" in store.notes[0]
        assert dump(connection) == before


@pytest.mark.parametrize("revision", ["0003", "0999"])
def test_the_commands_report_an_unknown_schema(tmp_path, revision):
    url = f"sqlite:///{tmp_path / 'gpuops.db'}"
    filled(url)
    _pretend(url, revision)

    upgraded = _gpuops_db("upgrade", url)
    shown = _gpuops_db("status", url)

    assert (upgraded.returncode, shown.returncode) == (EXIT_TRY_LATER, EXIT_OK)
    assert f"has schema revision {revision}, which this gpuops" in upgraded.stderr
    assert f"unknown, revision {revision}" in shown.stdout
    assert "name a new store" in upgraded.stderr
    assert "name a new store" in shown.stdout


def _gpuops_db(command, url):
    argv = [sys.executable, "-m", "gpuops", "db", command, "--store", url]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)


def test_a_database_of_something_else_is_left_alone(url):
    upgrade_store(url)
    downgrade(url, "base")
    _foreign(url)

    with pytest.raises(SchemaMismatchError, match="holds tables of another program"):
        open_store(url, mode="write")
    with pytest.raises(SchemaMismatchError, match="holds tables of another program"):
        upgrade_store(url)


def _foreign(url):
    from gpuops.store.backends import connect_engine, parse_url

    engine = connect_engine(parse_url(url), mode="write")
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE alembic_version"))
        connection.execute(text("CREATE TABLE invoices (id INTEGER)"))
    engine.dispose()


def test_a_reader_cannot_write(url):
    filled(url)

    with (
        pytest.raises(StoreUnreachableError, match=r"read-?only"),
        open_store(url, mode="read") as store,
        store.begin() as connection,
    ):
        connection.execute(text("DELETE FROM events"))


def test_sqlite_is_kept_in_wal_with_foreign_keys(tmp_path):
    with (
        open_store(f"sqlite:///{tmp_path}/store.db", mode="write") as store,
        store.begin() as connection,
    ):
        pragmas = [
            connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "busy_timeout", "foreign_keys")
        ]

        assert pragmas == ["wal", 1, 10_000, 1]
        assert inspect(connection).get_table_names()


def test_tables_that_are_new_are_filled_from_the_events_of_before(url):
    before = filled(url)
    new = ("strikes", "incident_culprits", "components", "node_states", "decisions", "exclusions")
    assert all(before[name] for name in new)

    with open_store(url, mode="write") as store, store.begin() as connection:
        for name in new:
            connection.execute(text(f"DELETE FROM {name}"))
        rebuild_projections(connection)

        assert dump(connection) == before


def test_what_the_first_schema_held_is_kept_as_changes(url):
    """Its check runs had a row for each finding, mostly passes."""
    parsed = parse_url(url)
    engine = connect_engine(parsed, mode="write")
    with IncidentStore(engine, parsed, session_timeout_s=600.0) as store:
        upgrade(store, "0001")
        with store.begin() as connection:
            for line in story(1):
                (row,) = _event_rows(line)
                connection.execute(insert(metadata.tables["events"]).values(row))

    assert upgrade_store(url) == ("0001", REVISION)

    with open_store(url, mode="read") as store, store.begin() as connection:
        runs = run_queries.check_runs(connection)
        results = connection.execute(text("SELECT check_name, status FROM check_results")).all()
    assert [(run.status, run.runs) for run in runs] == [("unknown", 1)] * 2
    assert [tuple(row) for row in results] == [("mounts", "unknown")] * 2


def test_an_upgrade_makes_the_views_anew_where_no_table_changed(url):
    upgrade_store(url)
    with open_store(url, mode="write") as store, store.begin() as connection:
        connection.execute(text("DROP VIEW v_nodes"))

    assert upgrade_store(url) == (REVISION, REVISION)

    with open_store(url, mode="read") as store, store.begin() as connection:
        assert connection.execute(text("SELECT count(*) FROM v_nodes")).scalar_one() == 0


def _event_rows(line):
    """Return the row of *line* in `events`, as a store has it."""
    with memory_store() as store, store.begin() as connection:
        ingest(connection, envelopes([line]), 1)
        return [
            dict(row) for row in connection.execute(select(metadata.tables["events"])).mappings()
        ]
