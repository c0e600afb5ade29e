"""``gpuops sweep show``, ``sweep history`` and ``node show``: sweeps out of the store."""

import contextlib
import io
import json
import random
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
from support.command import command_here
from support.stories import Teller, envelopes, pair
from support.sweeps import NODES, T0_US, a_sweep, events_of_sweep

from gpuops.burnin.pairs import node_pair
from gpuops.cli.sweep import _lead_step, _why_not, before_a_run
from gpuops.cli.sweep_result import print_sweep, stored_body, sweep_events
from gpuops.cli.sweep_show import known_pairs
from gpuops.config.resolve import environ, resolve
from gpuops.control.tcp.process import start_server
from gpuops.errors import GpuopsError
from gpuops.host.clock import FakeClock, SystemClock
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status
from gpuops.store.engine import open_store
from gpuops.store.ingest.batch import ingest
from gpuops.store.spool.format import LineEncoder, decode_line
from gpuops.sweep.coordinator import SweepResult
from gpuops.units import iso_utc


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    return command_here(tmp_path, monkeypatch, capsys)


@pytest.fixture
def put(tmp_path):
    """Return a function that puts events into the store as *uid*."""

    def add(events, uid=0):
        teller = Teller(uid)
        for event in events:
            teller.add(event)
        url = f"sqlite:///{tmp_path / 'store.db'}"
        with open_store(url, mode="write") as store, store.begin() as connection:
            ingest(connection, envelopes(teller.lines, uid=uid, cluster="default"), 7)

    return add


@pytest.mark.parametrize("words", [[], ["last"], ["5a3e"]])
def test_a_sweep_is_shown_as_it_was_printed(call, put, capsys, words):
    put([*events_of_sweep("5a3d", T0_US - 10**9), *events_of_sweep()])
    print_sweep(*a_sweep(), as_json=False)
    text = capsys.readouterr().out
    print_sweep(*a_sweep(), as_json=True)
    body = json.loads(capsys.readouterr().out)

    assert call("sweep", "show", *words) == (0, text, "")
    code, out, err = call("sweep", "show", *words, "--json")
    assert (code, json.loads(out), err) == (0, body, "")
    assert [(v["kind"], v["entity"]["id"]) for v in body["verdicts"]] == [("node", "n3")]
    assert body["findings"][0]["source"].startswith("gpuops: failed with two partners")
    assert (body["missing"], body["nodes"]) == ({"n4": "no route to host"}, list(NODES))


def test_the_text_has_the_matrix_what_went_wrong_and_the_verdict(call, put):
    put(events_of_sweep())
    _, out, _ = call("sweep", "show")

    assert out.startswith("sweep 5a3e of 4 nodes: n[0-3]\n")
    assert "n3   4 X X X \\" in out
    assert "n0,n3: n3: connection refused" in out
    assert "n0: fail (suite sweep, 9.00 s): sweep: node n3: failed: failed with n0" in out
    assert "node n4: did not join: no route to host" in out


@pytest.mark.parametrize("command", [("sweep", "show"), ("sweep", "show", "5a3e")])
def test_a_store_without_sweeps_and_one_that_does_not_answer(call, put, tmp_path, command):
    put([])
    code, out, err = call(*command)
    assert (code, out) == (64, "")
    assert err == "gpuops: the store holds no sweep with a test yet; `gpuops sweep` makes one\n"

    code, out, err = call(*command, "--store", f"sqlite:///{tmp_path}/typo/gpuops.db")
    assert (code, out) == (75, "")
    assert (
        f"cannot open the store sqlite:///{tmp_path}/typo/gpuops.db: there is no such file" in err
    )


def test_a_sweep_that_tested_nothing_does_not_hide_the_last_that_did(call, put):
    empty = {**a_sweep()[0], "n_tests": 0}
    later = [FakeClock(T0_US + number) for number in range(1, 8)]
    events = [
        event
        for number, clock in enumerate(later, 1)
        for event in sweep_events({**empty, "sweep": f"e{number}"}, (), "n0", clock)
    ]
    put([*events_of_sweep(), *events])

    assert json.loads(call("sweep", "show", "--json")[1])["sweep"] == "5a3e"
    assert json.loads(call("sweep", "show", "e3", "--json")[1])["sweep"] == "e3"


def test_an_id_that_is_not_known_is_an_error_that_names_the_newest(call, put):
    put([*events_of_sweep("old", T0_US - 10**9), *events_of_sweep("new")])
    code, _, err = call("sweep", "show", "odl")

    when = [iso_utc(t_us)[:19].replace("T", " ") for t_us in (T0_US, T0_US - 10**9)]
    assert code == 64
    assert f"knows no sweep 'odl'; the newest are new ({when[0]} UTC), old ({when[1]} UTC)" in err


def test_a_sweep_of_a_user_and_one_that_is_still_on_its_way_are_said_to_be(call, put):
    put(events_of_sweep()[:4], uid=1000)
    put(events_of_sweep()[4:], uid=1001)
    code, out, err = call("sweep", "show")

    assert code == 0
    assert "n3   4 X     \\" in out
    assert "the store has 3 of its 6 tests" in err
    assert "user 1000 made this sweep, not root" in err


def test_a_record_that_cannot_be_read_is_one_error(call, put):
    ended, *_ = events_of_sweep()
    put([replace(ended, payload={"sweep": "5a3e", "shortened": True})])
    code, out, err = call("sweep", "show")

    assert (code, out) == (70, "")
    assert "the store's record of this sweep cannot be read" in err
    assert "Traceback" not in err


def test_options_of_a_sweep_before_show_are_refused(call):
    code, out, err = call("sweep", "--json", "show")

    assert (code, out) == (64, "")
    assert "--json before `show` starts no sweep; put it after `show`" in err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--hosts", "-oProxyCommand=x,b"), "'-oProxyCommand=x' is no host"),
        (("--hosts", "a"), "'a' names 1 host, and a pair needs two; one node alone is tested by"),
        (("--hosts", "a,a"), "'a,a' names 1 host, and a pair needs two"),
        (("--ssh", "ssh 'x"), """burnin.ssh "ssh 'x": No closing quotation"""),
        (("--remote", "'x"), "No closing quotation"),
        (("--remote", ""), "--remote '': a command is expected"),
        (("--seconds", "nan"), "'nan' is not a number"),
        (("--timeout", "nan"), "'nan' is not a number"),
        (("--size", "2TiB"), "'2TiB' is more than 1TiB"),
        (("--join", "there"), "--join 'there': HOST:PORT is expected"),
        (("--join", "there:99999999"), "HOST:PORT is expected"),
    ],
)
def test_mistakes_on_the_command_line_are_64(call, words, text):
    code, out, err = call("sweep", "--hosts", "127.0.0.1,127.0.0.2", *words)

    assert (code, out) == (64, "")
    assert text in err
    assert "Traceback" not in err


def test_a_step_of_one_node_is_64_and_says_what_tests_it(call, monkeypatch):
    step = {"JOB_ID": "7", "STEP_ID": "0", "PROCID": "0", "STEP_NODELIST": "n1"}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    code, out, err = call("sweep")

    assert (code, out) == (64, "")
    assert "the step has one node, n1, and a pair needs two; `gpuops burnin` tests one node" in err


def test_a_node_with_another_token_takes_no_part_and_says_so(call, tmp_path, monkeypatch):
    monkeypatch.setenv("GPUOPS_STATE", str(tmp_path / "state"))
    server = start_server("127.0.0.1", 0, run_key="k", token="right")
    try:
        monkeypatch.setattr("sys.stdin", io.StringIO("wrong\n"))
        place = ("--join", f"127.0.0.1:{server.port}", "--run-key", "k", "--name", "n1")
        code, out, err = call("sweep", "--no-check", *place)
    finally:
        server.kill()

    assert (code, out) == (70, "")
    assert "token" in err
    assert "Traceback" not in err


def test_an_ssh_that_is_not_there_leaves_no_server(call):
    before = set(psutil.Process().children())
    code, out, err = call("sweep", "--hosts", "127.0.0.1,127.0.0.2", "--ssh", "/nonexistent/ssh")

    assert (code, out) == (64, "")
    assert err == "gpuops: --ssh: cannot start /nonexistent/ssh: No such file or directory\n"
    assert set(psutil.Process().children()) == before


@pytest.mark.parametrize(
    ("code", "text"),
    [(1, "exited with code 1: gpuops: not found"), (0, "exited with code 0: gpuops: not found")],
)
def test_a_host_whose_command_ends_at_once_is_not_waited_for(call, code, text):
    ssh = f"sh -c 'echo gpuops: not found >&2; exit {code}'"
    found = call("sweep", "--hosts", "127.0.0.1,127.0.0.2", "--ssh", ssh, "--no-record", "--json")

    assert found[0] == 3
    assert json.loads(found[1])["missing"] == dict.fromkeys(("127.0.0.1", "127.0.0.2"), text)


def test_a_connection_that_ssh_keeps_open_for_later_delays_nothing(call):
    ssh = "sh -c 'sleep 300 & echo $! >&2; exit 1'"
    found = call("sweep", "--hosts", "127.0.0.1,127.0.0.2", "--ssh", ssh, "--no-record", "--json")
    missing = json.loads(found[1])["missing"].values()
    for text in missing:
        process = psutil.Process(int(text.removeprefix("exited with code 1: ")))
        assert process.is_running()  # it holds the output that ssh leaves
        process.kill()

    assert (found[0], len(missing)) == (3, 2)


def test_a_sweep_too_large_for_an_event_keeps_its_worst_findings():
    body, check_run, tests = a_sweep()
    more = [
        Finding(
            check="sweep",
            entity=Entity(EntityKind.NODE, f"m{number}"),
            status=Status.WARN,
            message="x" * 300,
        ).to_json()
        for number in range(2000)
    ]
    missing = {f"m{number}": "no route to host" for number in range(10_000)}
    body |= {"findings": [*body["findings"], *more], "missing": missing}
    ended = sweep_events(body, tests, "n0", FakeClock())[0]
    encoder = LineEncoder(node="n0", boot_id="b", randomness=random.Random(1).randbytes)

    kept, again = stored_body(decode_line(encoder.encode(ended)).event.payload)

    assert kept["findings"][0] == body["findings"][0]
    assert again.findings[0] == check_run.findings[0]
    assert kept["verdicts"] == body["verdicts"]


def test_what_is_no_record_of_a_sweep_is_refused():
    ended, *_ = events_of_sweep()
    for name in ("findings", "nodes", "start", "verdicts"):
        with pytest.raises(GpuopsError, match="cannot be read"):
            stored_body({**ended.payload, name: None})


def weeks(repaired=None):
    """Return the events of twenty sweeps of 16 nodes in which n00 fails half of its tests."""
    rng, teller = random.Random(1), Teller(1)
    for night in range(20):
        order = rng.sample([f"n{number:02}" for number in range(16)], 16)
        for a, b in zip(order[::2], order[1::2], strict=True):
            is_bad = "n00" in (a, b) and night % 2
            changes = {"sweep": str(night), "outcome": "fail" if is_bad else "pass"}
            teller.tell("sweep.tested", pair(*node_pair(a, b), **changes))
    if repaired:
        entity = {"kind": "node", "id": repaired}
        teller.tell("node.repaired", node=repaired, entity=entity, by="ada", what="a new card")
    return [line.event for line in teller.lines]


SINCE = ("--since", "2025-01-01")


def test_a_node_that_fails_now_and_then_is_named_with_its_figures(call, put):
    put(weeks())
    code, out, _ = call("sweep", "history", *SINCE)

    assert code == 0
    assert "20 sweeps since 2025-01-01 00:00:00 UTC: 10 of 160 tests of pairs failed" in out
    assert "warn  node n00: failed 10 of 20 tests since its last repair" in out
    assert out.count("warn") == 1
    assert "a node that fails 20 % of its tests is found by these sweeps with a probability" in out
    assert "source: exact binomial test" in out


def test_the_history_as_json(call, put):
    put(weeks())
    code, out, _ = call("sweep", "history", *SINCE, "--json")
    body = json.loads(out)

    assert code == 0
    assert (body["sweeps"], body["tests"], body["failed"]) == (20, 160, 10)
    (finding,) = body["findings"]
    assert (finding["entity"]["id"], finding["status"], finding["value"]) == ("n00", "warn", 50.0)
    assert [item["rate"] for item in body["power"]] == [0.05, 0.1, 0.2]
    assert all(0 < item["found"] < 1 and item["sweeps"] > 20 for item in body["power"])


@pytest.mark.parametrize(("repaired", "n_named"), [("n00", 0), ("n07", 1)])
def test_a_repair_of_the_node_starts_its_count_anew(call, put, repaired, n_named):
    put(weeks(repaired))
    _, out, _ = call("sweep", "history", *SINCE)

    assert out.count("warn  node n00") == n_named
    assert ("no node or pair fails more often than the others" in out) is not bool(n_named)


def test_old_sweeps_and_those_of_others_do_not_count(call, put):
    put(weeks(), uid=4242)
    _, of_others, _ = call("sweep", "history", *SINCE)
    put(weeks())
    _, old, _ = call("sweep", "history")

    assert "0 sweeps since 2025-01-01" in of_others
    assert old.startswith("0 sweeps since 20")
    assert "no node or pair fails" in old


@pytest.fixture
def known():
    """Return a function that asks for the pairs that earlier sweeps tested, as a sweep does."""
    return lambda: known_pairs(resolve({}, environ(), is_root=False))


def test_a_sweep_knows_the_pairs_of_earlier_ones(call, put, known, capsys):
    now_us = SystemClock().now_us()
    old = events_of_sweep("old", now_us - 100 * 86_400 * 10**6)
    put([*old, *events_of_sweep("new", now_us)[:3]])

    assert known() == {("n0", "n1"), ("n0", "n2")}
    assert capsys.readouterr().err == ""


@pytest.fixture
def why_not(call):
    """Return a function that says why nodes of a run need no sweep, as its leader asks."""
    return lambda *nodes: _why_not(resolve({}, environ(), is_root=False), nodes)


def test_nodes_are_swept_before_a_run_unless_all_of_them_were_lately(why_not, put, monkeypatch):
    hour_us = 3_600 * 10**6
    put(events_of_sweep("old", SystemClock().now_us() - 23 * hour_us)[:2])

    assert why_not("n0", "n1") == (
        "all nodes were swept in the last 24 h 00 min (burnin.sweep_max_age)"
    )
    assert why_not("n0", "n1", "n2") is None
    assert why_not("n0") == "no other node came to test it with"
    monkeypatch.setenv("GPUOPS_BURNIN_SWEEP_MAX_AGE", "22h")
    assert why_not("n0", "n1") is None


def test_nodes_are_swept_where_the_store_cannot_be_read_and_that_is_said(why_not, capsys):
    assert why_not("n0", "n1") is None

    assert "does not know which pairs earlier ones tested: cannot open" in capsys.readouterr().err


def test_without_a_store_no_pair_is_known_and_that_is_said(call, known, capsys):
    assert known() == frozenset()

    assert "this sweep does not know which pairs earlier ones tested: cannot open" in (
        capsys.readouterr().err
    )


def test_a_node_has_its_last_sweep_and_what_it_said(call, put):
    put(events_of_sweep())
    put([Teller(7).event("node.seen", node="n3")], uid=0)
    code, out, _ = call("node", "show", "n3")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    text = " ".join(lines)

    assert code == 0
    at = lines.index("last sweep")
    assert "sweep 5a3e: 0 of 3 tests passed" in lines[at + 1]
    assert "fail sweep, node n3: failed: failed with n0, n1, n2" in text
    assert "threshold: passes with two partners; source: gpuops: failed with two" in text
    assert "fail with n0" in lines
    assert lines[lines.index("last burn-in") + 1] == "none"

    body = json.loads(call("node", "show", "n3", "--json")[1])
    assert body["burnin"] is None
    assert body["sweep"]["sweep"] == "5a3e"
    assert [test["outcome"] for test in body["sweep"]["tests"]] == ["fail"] * 3
    assert [item["entity"]["id"] for item in body["sweep"]["findings"]] == ["n3"]


class FirstNode:
    """The node that leads a sweep, without a gate."""

    name, is_recorded = "n1", False

    def __init__(self):
        self.context = SimpleNamespace(clock=FakeClock())
        self.settled = []

    @contextlib.contextmanager
    def locked(self, name):
        yield name

    def settle(self, found, _start_us):
        self.settled += found


class Leader:
    """Finds that the node fails."""

    def lead_step(self, _place, _me, _env):
        result = SweepResult(
            sweep="s1",
            nodes=("n1", "n2"),
            missing={},
            unfit={},
            tests=(),
            details={},
            verdicts=(),
            findings=(),
            share_tested=1.0,
        )
        return result, ["n1 fails"]


def test_a_result_that_nobody_can_read_keeps_no_node_from_its_gate(monkeypatch):
    node = FirstNode()
    with open("/dev/full", "w") as full:  # noqa: PTH123 a device
        monkeypatch.setattr("sys.stdout", full)
        with pytest.raises(OSError, match="No space"):
            _lead_step(Leader(), node, None, 0, as_json=True)
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()

    assert node.settled == ["n1 fails"]


@pytest.mark.parametrize(
    ("failure_class", "status"),
    [
        (FailureClass.HOST_SLOW, Status.WARN),
        (FailureClass.GPU_SLOW, Status.FAIL),
        (FailureClass.NETWORK_NODE_FAILING, Status.FAIL),
    ],
)
def test_before_a_run_slow_processors_only_warn(failure_class, status):
    found = Finding(
        check="sweep",
        entity=Entity(EntityKind.NODE, "n1"),
        status=Status.FAIL,
        message="slow",
        value=1.0,
        threshold=">= 2 GB/s",
        source="this sweep",
        failure_class=failure_class,
    )

    assert before_a_run(found) == replace(found, status=status)
