"""``gpuops detect replay`` over dumps of torch's flight recorder: real ones, and damaged ones."""

import gzip
import itertools
import json
import os
from pathlib import Path

import pytest
from support.command import command_here
from support.gloo_ranks import run_script
from support.recorded_job import RecordedJob, four_by_four

from gpuops.agent.monitors.recorder.kept import keep_recorders
from gpuops.convert.flight_recorder import read_dump
from gpuops.detect.own_time import Measure, RankSteps
from gpuops.detect.step_summary import pack_summary
from gpuops.detect.step_trace import SCHEMA

JOB = Path(__file__).parents[1] / "fixtures" / "jobs" / "recorded_hang.py"
GROUPS, PROGRAMS = four_by_four()


@pytest.fixture
def gpuops(tmp_path, monkeypatch, capsys):
    return command_here(tmp_path, monkeypatch, capsys)


@pytest.fixture
def dumps(tmp_path):
    """Return a folder with the dumps of 16 ranks, of which 9 and 14 stopped."""
    folder = tmp_path / "dumps"
    folder.mkdir()
    job = RecordedJob(GROUPS, PROGRAMS, stops_before={9: 2, 14: 2}).play()
    for rank in PROGRAMS:
        (folder / f"nccl_trace_rank_{rank}").write_bytes(job.dump(rank))
    return folder


@pytest.mark.torch
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("hang", "kind", "ranks"), [("skip", "absent", [2]), ("cross", "deadlock", [2])]
)
def test_a_real_hang_over_gloo_is_told_from_the_dumps_alone(tmp_path, gpuops, hang, kind, ranks):
    folder = tmp_path / "dumps"
    folder.mkdir()
    env = {"DUMPS": str(folder), "HANG": hang}
    codes = run_script(tmp_path, 4, JOB, "hang", env=env)
    assert codes == [0] * 4, [path.read_text() for path in tmp_path.glob("log-*")]

    code, out, err = gpuops("detect", "replay", "--json", *map(str, folder.glob("flight_*")))

    assert code == 1, err
    found = json.loads(out)
    assert (found["kind"], found["ranks"], found["dumps"]) == (kind, ranks, 4)
    assert set(found["waiting"]) == {0, 1, 2, 3} - set(ranks)
    assert found["pending"]["number"] == 5


def test_it_says_whom_the_job_waits_for_and_in_what(gpuops, dumps):
    code, out, _ = gpuops("detect", "replay", str(dumps))

    assert code == 1
    first, second = out.splitlines()
    assert first.startswith("absent: rank 9,14: the others wait in a collective that they have not")
    assert "waits in call 1 of group" in second
    assert second.endswith("all_reduce(1024 Float)")


def test_files_that_agents_have_kept_are_those_of_their_ranks(gpuops, dumps):
    files = [dumps / f"nccl_trace_rank_{rank}" for rank in range(16)]
    said = gpuops("detect", "replay", str(dumps))
    bodies = {rank: read_dump(file.read_bytes()) for rank, file in enumerate(files)}
    nodes = [dict(itertools.islice(bodies.items(), first, first + 8)) for first in (0, 8)]
    kept = [keep_recorders(dumps, bodies) for bodies in nodes]
    for file in files:
        file.unlink()

    assert gpuops("detect", "replay", str(dumps)) == said
    assert gpuops("detect", "replay", *map(str, kept)) == said
    code, _, err = gpuops("detect", "replay", str(kept[0]), str(kept[0]))
    assert code == 64
    assert "has rank 0-7, as another file has" in err
    kept[0].write_bytes(kept[0].read_bytes()[:-9])
    code, out, err = gpuops("detect", "replay", "--ranks", "16", str(dumps))
    assert code == 1
    assert f"{kept[0]} is no dump: it is cut off" in err
    assert "rank 0-7 left no dump that can be read" in out


def test_a_damaged_dump_is_named_and_its_rank_is_unknown(gpuops, dumps):
    (dumps / "nccl_trace_rank_3").write_bytes(b"\x80\x02damaged")

    code, out, err = gpuops("detect", "replay", str(dumps))

    assert code == 1
    assert "nccl_trace_rank_3 is no dump" in err
    assert "absent: rank 9,14" in out
    assert "rank 3 left no dump that can be read: nothing is known of it" in out


def test_without_one_dump_that_can_be_read_it_cannot_be_judged(gpuops, dumps):
    for file in dumps.iterdir():
        file.write_bytes(b"{}")

    code, _, err = gpuops("detect", "replay", str(dumps))

    assert code == 3
    assert err.count("is no dump") == 16


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["rank_1.json", "other_1"], "are both of rank 1"),
        ([], "has a name that ends with a rank"),
        (["README"], "has a name that ends with a rank"),
    ],
)
def test_files_that_cannot_be_told_apart_are_refused(gpuops, tmp_path, names, says):
    folder = tmp_path / "dumps"
    folder.mkdir()
    for name in names:
        (folder / name).write_text('{"entries": []}')

    code, _, err = gpuops("detect", "replay", str(folder))

    assert code == 64
    assert says in err


@pytest.mark.parametrize("is_empty", [True, False])
def test_where_dumps_are_empty_or_one_is_damaged_nothing_pending_cannot_be_judged(
    gpuops, tmp_path, is_empty
):
    folder = tmp_path / "dumps"
    folder.mkdir()
    job = RecordedJob({"0": [0, 1]}, {0: [("0", "barrier")], 1: [("0", "barrier")]}).play()
    bodies = [b'{"entries": []}'] * 2 if is_empty else [job.dump(0), job.dump(1)[:-5]]
    for rank, body in enumerate(bodies):
        (folder / f"rank_{rank}").write_bytes(body)

    code, out, _ = gpuops("detect", "replay", str(folder))

    assert code == 3
    assert out.startswith("cannot be judged: ")
    assert ("was the recorder on?" in out) is is_empty


def test_pipes_beside_the_dumps_are_left_alone_and_refused_by_name(gpuops, dumps):
    os.mkfifo(dumps / "nccl_trace_rank_3.pipe")

    assert gpuops("detect", "replay", str(dumps))[0] == 1
    code, _, err = gpuops("detect", "replay", str(dumps / "nccl_trace_rank_3.pipe"))
    assert (code, "is no regular file" in err) == (64, True)


def test_a_file_that_is_not_there_is_named(gpuops, tmp_path):
    code, _, err = gpuops("detect", "replay", str(tmp_path / "rank_0"))

    assert code == 3
    assert "rank_0 is no dump" in err


@pytest.fixture
def table(tmp_path):
    """Return a function that writes the table of 30 steps of two stages, one worker slow."""

    def write(n_ranks, n_steps=30, factor=1.5):
        lines = ["dp_rank,stage,rank,step,optype,start_ts,duration"]
        for step, stage, rank in itertools.product(range(n_steps), range(2), range(n_ranks)):
            seconds = (1 + stage) * (1 + (7 * step + 3 * rank) % 5 / 1000)
            seconds *= factor if (stage, rank) == (1, 2) else 1
            lines.append(f"{rank},{stage},{rank},{step},forward-compute,0,{seconds}")
        path = tmp_path / "steps.csv"
        path.write_text("\n".join(lines))
        return str(path)

    return write


def test_a_table_names_the_worker_that_is_slower_than_its_peers(gpuops, table):
    code, out, _ = gpuops("detect", "replay", table(4))

    assert code == 1
    assert out.startswith("slow: stage 1, data-parallel rank 2 computes 1.50 times as long as its")
    assert "the longest computation of a step would be 33% shorter" in " ".join(out.split())

    code, out, _ = gpuops("detect", "replay", "--json", table(4))

    (slow,) = json.loads(out)["slow"]
    assert (slow["stage"], slow["dp_rank"], slow["n_peers"]) == (1, 2, 3)


@pytest.mark.parametrize(
    ("about", "wanted", "says"),
    [
        ((4, 30, 1.0), 0, "nobody is slower than those that do the same work"),
        ((2, 30, 1.5), 3, "stage 0-1 cannot be judged: 3 workers of a stage and 14 steps in which"),
        ((4, 13, 1.5), 3, "cannot be judged"),
    ],
)
def test_a_table_may_name_nobody(gpuops, table, about, wanted, says):
    code, out, _ = gpuops("detect", "replay", table(*about))

    assert (code, says in out) == (wanted, True)


def test_a_file_that_is_no_such_table_is_refused(gpuops, tmp_path):
    path = tmp_path / "steps.csv"
    path.write_text("a,b\n1,2\n")

    code, _, err = gpuops("detect", "replay", str(path))

    assert code == 64
    assert "has no column 'dp_rank'" in err


def trace_of(folder, factor, generations=1, node_ranks=((0, 1), (2, 3)), n_reads=2):
    """Write the traces of two nodes that published *n_reads* times, rank 2 *factor* as slow."""
    for generation, (node, ranks) in itertools.product(range(generations), enumerate(node_ranks)):
        path = folder / f"generation-{generation}" / f"steps-{ranks[0]}.jsonl.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"generation": generation, "node": f"n{node}", "ranks": ranks, "slow_after_s": 10.0}
        lines = [{"schema": SCHEMA, **about}]
        for first in range(1, 1 + 20 * n_reads, 20):
            time_us = (1000 * generation + first) * 10**6
            lines += [{"rank": rank, "step": first, "time_us": time_us} for rank in ranks]
            body = {
                "generation": generation,
                "is_whole": False,
                "why": "",
                "ranks": {
                    str(rank): {
                        "steps": pack_summary(steps_of(rank, first, factor if rank == 2 else 1.0)),
                        "tokens": 0,
                    }
                    for rank in ranks
                },
            }
            lines.append({"monitor": "straggler", "time_us": time_us + node, "published": body})
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        path.write_bytes(gzip.compress(text.encode()))
    return folder


def steps_of(rank, first, factor):
    seconds = {n: factor * (1 + (7 * n + rank) % 5 / 1000) for n in range(first, first + 20)}
    return RankSteps(role=3, measure=Measure.OWN, seconds=seconds, step_s=1.0)


def test_a_trace_of_steps_names_the_slow_rank_as_the_leader_did(gpuops, tmp_path):
    folder = trace_of(tmp_path / "run", 1.2, generations=2)

    code, out, _ = gpuops("detect", "replay", str(folder))
    assert code == 1
    for generation in (0, 1):
        levels = [
            line.partition(f"generation {generation}: ")[2].split()[:4]
            for line in out.splitlines()
            if f"generation {generation}:" in line
        ]
        assert levels[-1] == ["suspect", "rank", "2", "on"]
    assert "straggler.host: rank 2 takes 1.20 times as long as 3 ranks that do the same" in out

    code, out, _ = gpuops("detect", "replay", "--json", str(folder / "generation-1"))
    body = json.loads(out)
    assert (code, body["steps"], body["ranks"], body["not_compared"]) == (1, 8, 4, [])
    slow = body["slow"][-1]
    assert (slow["generation"], slow["rank"], slow["node"]) == (1, "2", "n1")
    assert (slow["failure_class"], slow["level"]) == ("straggler.host", "suspect")
    assert slow["found"].startswith("1970-01-01T00:17:01")


def test_a_trace_without_a_slow_rank_names_nobody_and_one_of_two_ranks_cannot_be_judged(
    gpuops, tmp_path
):
    code, out, _ = gpuops("detect", "replay", str(trace_of(tmp_path / "even", 1.0)))
    assert (code, out.startswith("nobody is slower")) == (0, True)

    two = trace_of(tmp_path / "two", 1.5, node_ranks=((2, 3),))
    code, out, _ = gpuops("detect", "replay", str(two / "generation-0" / "steps-2.jsonl.gz"))
    assert code == 3
    why, verdict = out.splitlines()
    assert why == "no other ranks do the same as 2, 3: none of them is called slow"
    assert verdict.startswith("rank 2-3 cannot be judged: ")

    unread = trace_of(tmp_path / "unread", 1.5, n_reads=0)
    code, out, _ = gpuops("detect", "replay", str(unread))
    assert (code, out.startswith("rank 0-3 cannot be judged: ")) == (3, True)


def test_a_trace_that_is_cut_off_is_read_to_its_end_and_a_damaged_one_is_refused(gpuops, tmp_path):
    folder = trace_of(tmp_path / "run", 1.2)
    path = folder / "generation-0" / "steps-0.jsonl.gz"
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:40])
    code, out, err = gpuops("detect", "replay", str(folder))
    assert (code, "rank 2" in out) == (1, True)
    assert err == f"gpuops: the end of {path} is cut off\n"

    lines = gzip.decompress(whole).decode().splitlines(keepends=True)
    foreign = "".join(line.replace('"is_whole"', '"is_hole"') for line in lines)
    for content, why in (
        (b"not gzip", "Not a gzipped file"),
        (whole[:30] + b"\0\0\0" + whole[33:], "cannot read the trace"),
        (gzip.compress(b"{}\n"), "line 1 is none of a trace of steps"),
        (gzip.compress(b"[" * 10**6), "line 1 is none of a trace of steps"),
        (gzip.compress(foreign.encode()), "what was published in the trace cannot be judged"),
    ):
        path.write_bytes(content)
        code, _, err = gpuops("detect", "replay", str(folder))
        assert (code, why in err) == (64, True), err
