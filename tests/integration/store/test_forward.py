"""Root forwards the spools of users: once, within bounds, and what they may say."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from support.command import gpuops
from support.stories import START_US, incident, node_incident, story
from support.user_spools import DATA, LINES, NOW_US, ORIGIN, OTHER, RUN, USER, as_user, line, raw

from gpuops.host.clock import FakeClock
from gpuops.incident.decision import NodeReport, ReportKind
from gpuops.incident.incidents.cluster import preflight_incident, suspect_incident
from gpuops.incident.incidents.replicas import ReplicaMismatch, incident_from_replicas
from gpuops.model import Incident, run_incident_id
from gpuops.store import schema
from gpuops.store.checks import check_runs
from gpuops.store.engine import open_store
from gpuops.store.prune import Retention, prune
from gpuops.store.spool import forward as forward_module
from gpuops.store.spool import send as send_module
from gpuops.store.spool.record import spool_recorder
from gpuops.store.spool.users import find_user_spools, make_user_spool, own_user_spool

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="root forwards what others write")
FIXTURES = Path(__file__).parents[2] / "fixtures"


def test_lines_arrive_once_with_the_uid_of_their_spool(either):
    either.lay()

    first, second = either.forward(), either.forward()

    assert (first.users, first.sent, first.note) == (1, len(LINES), None)
    assert (second.users, second.sent) == (0, 0)
    assert list(either.spool.iterdir()) == []
    assert {row["origin_uid"] for row in either.rows(schema.events)} == {USER}
    assert [row["id"] for row in either.rows(schema.runs)] == [RUN]


def forwarder(machine, die_at="", start=None):
    """Return a process that forwards, once *start* can be read, and dies where it is told to."""

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def run():
        send_module.BATCH_LINES = 4
        if die_at == "before its commit":
            send_module.ingest = die
        elif die_at == "after its commit":
            send_module.SpoolSender._release_segments = die
        elif die_at == "within its removal":
            send_module.remove_segment = die
        if start is not None:
            os.read(start, 1)
        machine.forward()

    return as_user(run, uid=0)


@pytest.mark.parametrize("die_at", ["before its commit", "after its commit", "within its removal"])
def test_a_forwarder_that_is_killed_loses_and_doubles_nothing(either, die_at):
    either.lay()
    _, status = os.waitpid(forwarder(either, die_at), 0)

    report = either.forward()

    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert (report.sent > 0) == (die_at != "within its removal")
    assert sorted(event.id for event in either.events()) == sorted(item.event.id for item in LINES)
    assert sum(row["rows"] for row in either.rows(schema.ingest_log)) == len(LINES)
    assert list(either.spool.iterdir()) == []


def test_forwarders_at_once_lose_and_double_nothing(either):
    for number in range(1, 21):
        lines = [
            line("attempt.progress", {"minute_us": START_US + n}, seq=number * 100 + n)
            for n in range(5)
        ]
        either.lay(raw(lines), number=number)
    ready, go = os.pipe()
    pids = [forwarder(either, start=ready) for _ in range(2)]
    os.write(go, b"go")
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    os.close(ready)
    os.close(go)

    either.forward()

    assert ended == [0, 0]
    assert len(either.events()) == 100
    assert sum(row["rows"] for row in either.rows(schema.ingest_log)) == 100
    assert list(either.spool.iterdir()) == []


def test_forwarders_that_ignore_the_lock_double_nothing_either(either):
    """A user's spool that two nodes share, as it were: only the store tells them apart."""
    other_root = either.base / "other"
    other_root.mkdir()
    either.lay(suffix="open")
    either.hold_lock(either.spool / ORIGIN / "00000001.open")

    first, second = either.forward(), either.forward(spool_dir=other_root)

    assert (first.sent, first.already_there) == (len(LINES), 0)
    assert (second.sent, second.already_there) == (0, len(LINES))


REFUSED = {
    "a check": line("check.ran", story(1)[1].event.payload),
    "a drain": line("node.drained", {"reason": "mine", "actor": "root"}),
    "a resume": line("node.resumed", {"reason": "mine", "actor": "root"}),
    "a repair": line(
        "node.repaired", {"entity": {"kind": "node", "id": "n1"}, "by": "me", "what": "it"}
    ),
    "a decision of the gate": line("gate.decided", {"course": "drain"}),
    "another node": line("attempt.progress", {"minute_us": START_US}, node="n2"),
    "no run": line("attempt.progress", {"minute_us": START_US}, run_id=None),
    "a time to come": line("run.phase", t_us=NOW_US + 10**10),
    "a time long ago": line("run.phase", t_us=NOW_US - 10**13),
    "an incident of the node": line("incident.recorded", node_incident().to_json()),
    "an incident of another run": line("incident.recorded", incident("r2", 0).to_json()),
    "a payload that no table takes": line("attempt.progress", {"minute_us": "soon"}),
}


def test_a_user_says_nothing_but_about_a_run_on_this_node(machine):
    wrong = [
        replace(item, seq=700 + n, event=replace(item.event, id=f"{item.event.id[:-2]}{n:02x}"))
        for n, item in enumerate(REFUSED.values())
    ]
    machine.lay(raw([*LINES, *wrong]))

    report = machine.forward()

    (told,) = machine.events(kind="tool.failed")
    kept = machine.roots / "users" / str(USER) / "rejected" / f"{ORIGIN}-00000001.jsonl"
    reasons = [json.loads(text)["reason"] for text in kept.read_text().splitlines()]
    assert (report.sent, report.refused, report.note) == (len(LINES), len(REFUSED), None), reasons
    assert len(machine.events()) == len(LINES) + 1
    assert f"spool of uid {USER} has refused lines" in told.payload["error"]
    assert [row["origin_uid"] for row in machine.rows(schema.events)].count(0) == 1
    assert list(machine.spool.iterdir()) == []


def test_a_user_is_reported_once_a_day(machine):
    for n in range(2):
        machine.lay(b"noise\n", number=n + 1)
        machine.forward()

    assert len(machine.events(kind="tool.failed")) == 1


def test_every_kind_of_event_of_a_run_is_forwarded():
    events = json.loads((FIXTURES / "public_interface.json").read_text())["a run"]["events"]
    skipped = {"node.seen"}

    refused = {
        kind
        for kind in events
        if forward_module.why_refused(
            line(kind, {"run": RUN, "attempt": 0, "id": incident(RUN, 0).id}).event,
            nodes=frozenset({"n1"}),
            now_us=NOW_US,
        )
    }

    assert refused == skipped


def test_each_incident_that_is_no_attempts_end_is_forwarded():
    report = NodeReport(kind=ReportKind.GATE_FAILED, node="n2", generation=3)
    mismatch = ReplicaMismatch(
        description="rank 1 differs",
        step=7,
        epoch=0,
        ranks="0-2",
        suspects=(1,),
        by_majority=True,
        is_local=False,
    )
    made = (
        preflight_incident(report, run_id=RUN, now_us=NOW_US),
        suspect_incident(report, run_id=RUN, now_us=NOW_US),
        incident_from_replicas(mismatch, run_id=RUN, node="n1", at_us=NOW_US),
    )

    for told in made:
        payload = Incident.from_json(told.to_json()).to_json()
        event = line("incident.recorded", payload, t_us=NOW_US).event
        assert forward_module.why_refused(event, nodes=frozenset({"n1"}), now_us=NOW_US) is None


def backlog(machine, clock=None):
    clock = clock or FakeClock(NOW_US)
    return forward_module.measure_users(machine.options, clock=clock, deadline_s=5)


def test_what_waits_in_users_spools_is_measured_beyond_roots_marks(machine):
    machine.hold_lock(machine.lay(suffix="open"))
    machine.forward()
    with (machine.spool / ORIGIN / "00000001.open").open("ab") as file:
        file.write(b"more\n")
    path = machine.lay(DATA, uid=OTHER, origin="n1.0123456789ab")
    os.utime(path, (1000, 1000))

    found = backlog(machine)

    assert (found.users, found.segments, found.bytes) == (2, 2, len(DATA) + 5)
    assert (found.oldest_us, found.is_complete) == (1000 * 10**6, True)


def test_a_user_makes_the_measure_of_users_spools_no_work(machine, monkeypatch):
    """Neither a file without end nor files without number: they are counted up to a bound."""
    monkeypatch.setattr(forward_module, "MEASURED_MAX", 3)
    os.truncate(machine.lay(), 2**40)
    for number in range(2, 6):
        machine.lay(number=number)
    machine.lay(uid=OTHER, origin="n1.0123456789ab")

    found, late = backlog(machine), backlog(machine, Passing(NOW_US))

    assert (found.users, found.segments, found.is_complete) == (2, 4, False)
    assert found.bytes <= forward_module.SEGMENT_BYTES_MAX + 3 * len(DATA)
    assert (late.segments, late.is_complete) == (0, False)


class Passing(FakeClock):
    """Each look at this clock is ten seconds after the one before."""

    def mono_ns(self):
        self.advance(10)
        return super().mono_ns()


def test_db_status_shows_what_waits_in_users_spools(machine):
    machine.lay()
    options = (f"--store={machine.url}", "--json")
    environment = {"GPUOPS_SPOOL": str(machine.roots), "GPUOPS_SPOOL_USERS": str(machine.users)}

    done = gpuops("db", "status", *options, env=environment)

    users = json.loads(done.stdout)["users"]
    assert (users["users"], users["bytes"], users["error"]) == (1, len(DATA), None)
    assert users["rejected"] == 0


def test_db_status_counts_refused_lines_of_users_and_says_how_to_send_them(machine):
    machine.lay(raw([line("attempt.progress", {"minute_us": "soon"})]))
    machine.forward()
    environment = {"GPUOPS_SPOOL": str(machine.roots), "GPUOPS_SPOOL_USERS": str(machine.users)}

    shown = gpuops("db", "status", f"--store={machine.url}", env=environment).stdout

    assert "1 refused lines are kept in users/*/rejected/ of the spool" in shown
    assert "`gpuops db replay` sends them again" in shown


def test_what_an_agent_says_of_its_node_stays_behind(machine):
    lost = line("tool.failed", {"what": "spool"}, run_id=None, seq=501)
    machine.lay(raw([line("node.seen", {"kernel": "6.66"}), lost, *LINES]))

    report = machine.forward()

    assert (report.sent, report.refused) == (len(LINES), 0)
    assert machine.rows(schema.boots) == []


def steal(kind="attempt.progress", payload=None, **changes):
    return line(kind, payload or {"minute_us": START_US}, **changes)


def test_a_run_belongs_to_the_user_of_its_first_event(either):
    either.lay()
    either.forward()
    stolen = steal("run.ended", {"outcome": "failed"}, origin="n1.0123456789ab")
    either.lay(raw([stolen]), uid=OTHER, origin="n1.0123456789ab")

    report = either.forward()

    kept = either.roots / "users" / str(OTHER) / "rejected" / "n1.0123456789ab-00000001.jsonl"
    assert (report.sent, report.refused) == (0, 1)
    assert f"that of uid {USER} of c1, not {OTHER}" in json.loads(kept.read_text())["reason"]
    assert [row["outcome"] for row in either.rows(schema.runs)] == [None]


def test_a_run_whose_events_were_pruned_can_be_claimed_by_nobody(either):
    """What is left of it, in the tables of runs, does not say whose it is."""
    either.lay()
    either.forward()
    with open_store(either.url, mode="write") as store:
        deleted = prune(store, Retention(events_days=1), NOW_US + 2 * 86_400 * 10**6)
    stolen = steal("run.ended", {"outcome": "failed"}, seq=900)
    either.lay(raw([stolen]), uid=OTHER)

    report = either.forward()

    kept = either.roots / "users" / str(OTHER) / "rejected" / f"{ORIGIN}-00000001.jsonl"
    assert deleted["ingest_log"] == 1
    assert (report.sent, report.refused) == (0, 1)
    assert "its run's events, which say whose it is, were pruned" in kept.read_text()
    assert [row["outcome"] for row in either.rows(schema.runs)] == [None]


def test_a_run_of_another_cluster_is_another_users(machine):
    machine.lay()
    machine.forward(cluster="c2")
    machine.lay(raw([steal()]))

    assert machine.forward().refused == 1


def test_a_user_takes_no_number_of_anothers_writer(either):
    either.lay()
    either.forward()
    taken = steal(run_id="01a1fa51-d523-777c-b8fe-ce320f93dce8")
    either.lay(raw([taken]), uid=OTHER)

    report = either.forward()

    assert (report.sent, report.refused) == (0, 1)


def test_a_user_changes_no_incident_of_another(either):
    theirs = incident(RUN, 0)
    either.lay(raw([line("incident.recorded", theirs.to_json())]))
    either.forward()
    run, origin = "01a1fa51-d523-777c-b8fe-ce320f93dce8", "n1.0123456789ab"
    forged = incident(run, 0, id=theirs.id, authority=9, rev=9, title="nothing happened")
    stolen = line("incident.recorded", forged.to_json(), run_id=run, origin=origin, seq=2)
    either.lay(raw([stolen]), uid=OTHER, origin=origin)

    report = either.forward()

    assert (report.sent, report.refused) == (0, 1)
    assert [row["title"] for row in either.rows(schema.incidents) if row["run_id"]] == [
        theirs.title
    ]


@pytest.mark.parametrize("about", ["0", "0/n1", "doubt n1", "replicas 0-1/0.7"])
def test_a_user_takes_no_incident_of_anothers_run_in_advance(either, about):
    """The other's run id is known, from a command line; its incident is not yet in the store."""
    own_id, run, origin = run_incident_id(RUN, about), "r-of-the-other", "n1.0123456789ab"
    for n, lie in enumerate((None, about, f"../{RUN}/{about}", 7, "\ud800")):
        taken = incident(run, 0, id=own_id, about=lie, authority=9, rev=9).to_json()
        told = line("incident.recorded", taken, run_id=run, origin=origin, seq=n + 1)
        either.lay(raw([told]), uid=OTHER, origin=origin, number=n + 1)
    first = either.forward()
    theirs = incident(RUN, 0, id=own_id, about=None if about == "0" else about, title="true")
    either.lay(raw([line("incident.recorded", theirs.to_json(), seq=600)]))

    second = either.forward()

    kept = either.roots / "users" / str(OTHER) / "rejected" / f"{origin}-00000001.jsonl"
    assert (first.sent, second.sent, second.refused) == (0, 1, 0)
    assert "the id of its incident is not made of its run's" in kept.read_text()
    assert [row["title"] for row in either.rows(schema.incidents) if row["run_id"]] == ["true"]


def test_a_user_changes_no_incident_of_root(machine):
    roots = node_incident()
    with open_store(machine.url, mode="write") as store, store.begin() as connection:
        from_root(connection, roots)
    forged = incident(RUN, 0, id=roots.id, authority=9, rev=9)
    machine.lay(raw([line("incident.recorded", forged.to_json())]))

    report = machine.forward()

    assert (report.sent, report.refused) == (0, 1)
    assert len(machine.rows(schema.incident_culprits)) == len(roots.culprits)


def from_root(connection, recorded):
    from gpuops.store.ingest.batch import ingest
    from gpuops.store.ingest.envelope import EventEnvelope

    told = line("incident.recorded", recorded.to_json(), run_id=None, origin="n1.ba9876543210")
    ingest(connection, [EventEnvelope(told, "c1", 0)], NOW_US)


def test_what_a_user_says_makes_no_strike_and_no_drain(either):
    """An incident of their own run that blames the node with a hardware fault."""
    blames = replace(node_incident(), id=incident(RUN, 0).id, run_id=RUN, attempt=0)
    failures = [line("incident.recorded", blames.to_json(), seq=600)]
    failures += [line("node.excluded", {"excluded": "n1", "reason": "bad"}, seq=601)]
    either.lay(raw([*LINES, *failures]))

    report = either.forward()

    assert (report.sent, report.refused) == (len(LINES) + 2, 0)
    for table in (schema.strikes, schema.node_states, schema.components, check_runs):
        assert either.rows(table) == []
    assert either.rows(schema.drain_permits) == []


def test_a_failure_of_gpuops_in_one_users_run_does_not_hide_anothers(machine):
    other = "01a1fa51-d523-777c-b8fe-ce320f93dce8"
    failed = {"what": "nvml", "error": "no library", "traceback": None}
    machine.lay(raw([line("tool.failed", failed)]))
    second = line("tool.failed", failed, run_id=other, origin="n1.0123456789ab", seq=2)
    machine.lay(raw([second]), uid=OTHER, origin="n1.0123456789ab")

    machine.forward()

    titles = {row["title"] for row in machine.rows(schema.incidents)}
    assert len(titles) == 2


def test_a_user_who_writes_too_much_waits_for_the_next_hour(machine, monkeypatch):
    monkeypatch.setattr(forward_module, "LINES_PER_HOUR", 2 * len(LINES))
    lines = [steal(seq=n) for n in range(1, 4 * len(LINES) + 1)]
    for number in range(4):
        part = lines[number * len(LINES) : (number + 1) * len(LINES)]
        machine.lay(raw(part), number=number + 1)
    machine.lay(
        raw([steal(run_id=OTHER_RUN, origin="n1.0123456789ab")]),
        uid=OTHER,
        origin="n1.0123456789ab",
    )
    clock = FakeClock(NOW_US)

    first, again = machine.forward(clock), machine.forward(clock)
    clock.advance(3600)
    last = machine.forward(clock)

    assert (first.users, first.sent, first.held_back) == (2, 2 * len(LINES) + 1, 1)
    assert (again.sent, again.held_back) == (0, 1)
    assert (last.sent, last.note) == (2 * len(LINES), None)
    assert len(machine.events()) == 4 * len(LINES) + 1


OTHER_RUN = "01a1fa51-d523-777c-b8fe-ce320f93dce9"


def test_bytes_are_bounded_as_lines_are(machine, monkeypatch):
    monkeypatch.setattr(forward_module, "BYTES_PER_HOUR", 1)
    machine.lay()
    machine.lay(raw([steal()]), number=2)

    assert (machine.forward().sent, machine.forward().sent) == (len(LINES), 0)


def test_each_user_has_a_share_of_the_time(machine):
    """The first one's share passes at once: the clock goes on by a second at each question."""

    class Slow(FakeClock):
        def mono_ns(self):
            self.advance(0.001)
            return super().mono_ns()

    origin = "n1.0123456789ab"
    for number in range(1, 200):
        machine.lay(
            raw([steal(seq=number, origin=origin)]), number=number, uid=OTHER, origin=origin
        )
    machine.lay(raw([steal(run_id=OTHER_RUN)]))

    report = machine.forward(Slow(NOW_US))

    assert machine.events(run_id=OTHER_RUN)
    assert report.users == 2


def test_a_store_that_is_away_leaves_all_where_it_is(machine):
    machine.lay()

    report = machine.forward(store_url="sqlite:////proc/nowhere/store.db")

    assert report.note.startswith("cannot ")
    assert machine.forward().sent == len(LINES)


def test_a_user_gets_a_spool_that_only_they_write(machine):
    assert make_user_spool(machine.users, OTHER, node="n1") is None
    assert make_user_spool(machine.users, OTHER, node="n1") is None

    found = (machine.users / str(OTHER)).stat()
    assert (found.st_uid, found.st_mode & 0o777) == (OTHER, 0o700)
    assert find_user_spools(machine.users) == [OTHER, USER]


@pytest.mark.parametrize("error", [FileExistsError, FileNotFoundError])
def test_prologs_at_once_each_make_their_spool(machine, monkeypatch, error):
    """The other one makes, or has renamed, the draft with the node's name."""

    def collide(*_):
        raise error(2, "the other prolog was first")

    monkeypatch.setattr("gpuops.store.spool.users.replace_file", collide)

    assert make_user_spool(machine.users, OTHER, node="n1") is None
    assert (machine.users / str(OTHER)).stat().st_uid == OTHER


def test_where_no_users_dir_is_nothing_is_made(machine):
    assert make_user_spool(machine.base / "none", USER, node="n1") is None
    assert not (machine.base / "none").exists()
    assert machine.forward(users_dir=machine.base / "none").users == 0


@pytest.mark.parametrize("way", ["open to all", "another's", "a link"])
def test_a_users_dir_that_is_not_roots_alone_is_refused(machine, way):
    machine.lay()
    users = machine.users
    if way == "open to all":
        users.chmod(0o1777)
    elif way == "another's":
        machine.own(users)
    else:
        users.rename(machine.base / "moved")
        users.symlink_to(machine.base / "moved")

    problem = make_user_spool(users, OTHER, node="n1")
    report = machine.forward()

    assert problem.startswith("cannot make the spool")
    assert report.note.startswith("cannot forward the spools")
    assert machine.events() == []


def test_a_link_in_place_of_a_spool_is_given_to_nobody(machine):
    (machine.users / str(OTHER)).symlink_to(machine.prey)

    assert make_user_spool(machine.users, OTHER, node="n1").startswith("cannot make the spool")
    assert machine.prey.stat().st_uid == 0


def test_an_agent_writes_a_copy_that_root_forwards(machine):
    """A process without root's rights; its own spool keeps what is its own store's."""
    home = machine.own(machine.base / "home") if (machine.base / "home").mkdir() is None else None

    def run():
        recorder = spool_recorder(
            home / "spool",
            node="n1",
            boot_id="b1",
            bytes_max=2**24,
            clock=FakeClock(NOW_US),
            users_dir=machine.users,
        )
        recorder.record(line("run.started", {"name": "train"}).event)
        recorder.close()

    assert os.waitpid(as_user(run), 0)[1] == 0
    report = machine.forward()

    assert (report.sent, report.note) == (1, None)
    assert len(list((home / "spool").rglob("*.ready"))) == 1
    assert own_user_spool(machine.users) is None, "root forwards no spool of its own"


def test_root_flushes_and_forwards_with_one_command(machine):
    env = {
        "GPUOPS_SPOOL": str(machine.roots),
        "GPUOPS_SPOOL_USERS": str(machine.users),
        "GPUOPS_STORE": machine.url,
        "SLURMD_NODENAME": "n1",
    }
    now = [replace(item, event=replace(item.event, t_us=now_us())) for item in LINES]
    machine.lay(raw(now))

    first = gpuops("db", "flush", env=env)
    machine.lay(raw([replace(steal(), event=replace(steal().event, t_us=now_us()))]))
    second = json.loads(gpuops("db", "flush", "--json", env=env).stdout)

    assert first.returncode == 0, first.stderr
    assert f"spools of 1 users: {len(LINES)} sent, 0 already there" in first.stdout
    assert second["forwarded"]["sent"] == 1
    assert second["sent"] == 0


def now_us():
    from gpuops.host.clock import SystemClock

    return SystemClock().now_us()


def test_a_prolog_makes_the_spool_of_its_jobs_user_and_names_the_node(machine):
    env = {
        "GPUOPS_SPOOL": str(machine.roots),
        "GPUOPS_SPOOL_USERS": str(machine.users),
        "GPUOPS_STORE": machine.url,
        "GPUOPS_STATE": str(machine.base / "state"),
        "SLURMD_NODENAME": "alias1",
        "SLURM_JOB_UID": str(OTHER),
        "SLURM_JOB_ID": "17",
    }

    done = gpuops("slurm", "prolog", "--verdict", str(machine.base / "state" / "verdict"), env=env)

    assert (machine.users / str(OTHER)).stat().st_uid == OTHER, done.stderr
    machine.lay(raw([steal(node="alias1")]))
    assert machine.forward().sent == 1, "a command by hand does not know Slurm's name"
