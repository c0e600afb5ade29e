"""Real workers that keep their state in memory: killed in every way, they go on from there."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from support.ledger import problems, read_lines, redone
from support.runs import JOBS, Run, is_alive, wait_until

from gpuops.checkpoint.storage.directory_lock import LOCK_NAME, DirectoryLock, this_process

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
JOB = JOBS / "resumes.py"
STEPS = 30
LIMIT_S = 120.0
CALM = "--pause=0.25"  # on a busy machine, too, a keeper has each state before the next one but one


class Training(Run):
    """A run of the job with a diary; its keepers' folders lie in the test's own folder."""

    def __init__(self, folder, *words, flags=(), env=None, tries=0, steps=STEPS):
        self.diary = folder / "diary"
        self.runtime = folder / "r"
        folder.mkdir(parents=True, exist_ok=True)
        self.runtime.mkdir(mode=0o700, exist_ok=True)
        self.steps = steps
        script = [JOB, "--diary", self.diary, "--steps", steps, *words]
        mine = {"XDG_RUNTIME_DIR": str(self.runtime), "PYTEST_TRY": str(tries), **(env or {})}
        super().__init__(folder, "--health-gate=off", *flags, *script, env=mine, cwd=folder)

    @property
    def directory(self):
        """Return the folder of the newest run."""
        return max(self.runs.glob("*"), default=None, key=lambda path: path.stat().st_ctime_ns)

    def lines(self):
        return read_lines(self.diary)

    def wait_for_step(self, number, generation=0):
        def is_there():
            assert self.process.poll() is None, self.said()
            made = [x for x in self.lines() if x.what == "step" and x.number >= number]
            return {x.rank for x in made if x.generation == generation} == {0, 1}

        wait_until(is_there, LIMIT_S, what=f"step {number} of generation {generation}")

    def pid_of(self, rank, generation=0):
        return next(x.pid for x in self.lines() if (x.rank, x.generation) == (rank, generation))

    def kept(self):
        """Return the step of the newest state in memory that the agent knows of, 0 for none."""
        assert self.process.poll() is None, self.said()
        url = f"http://127.0.0.1:{self.state()['http_port']}/state"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return (json.load(answer)["checkpoint"] or {}).get("step") or 0

    def wait_for_kept(self, number):
        wait_until(lambda: self.kept() >= number, LIMIT_S, what=f"a state of step {number}")

    def keeper(self):
        """Return the pid of the keeper that serves now."""
        return wait_until(self.keepers, what="a keeper")[0]

    def keepers(self):
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            here = [w for w in words if w.startswith(os.fsencode(self.runtime))]
            if here and b"gpuops.checkpoint.keeper.serve" in words and is_alive(int(process.name)):
                found.append(int(process.name))
        return found

    def weights(self):
        found = dict(re.findall(r"rank (\d) weights (\w+) after", self.said()))
        assert set(found) == {"0", "1"}, self.said()
        return found

    def loads(self):
        return [(p["rank"], p["step"], p["tier"]) for p in self.payloads("checkpoint.restored")]

    def finished(self, code=0):
        assert self.finish(LIMIT_S) == code, self.said()
        return self


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the digests of a run that nothing happened to."""
    with Training(tmp_path_factory.mktemp("undisturbed")) as run:
        run.finished()
        assert run.payloads("checkpoint.restored") == []
        assert problems(run.lines(), STEPS) == []
        assert run.said().count("the Checkpointer starts at step 0: no state is in memory, ") == 1
        return run.weights()


def assert_whole(run, undisturbed):
    """Every step was trained, from a state that was saved; the weights are those of no failure."""
    assert problems(run.lines(), STEPS) == []
    assert run.weights() == undisturbed


def assert_nothing_left(run):
    """The keeper has ended, and its folder is gone."""
    wait_until(lambda: not run.keepers(), what="the end of the keeper")
    assert list((run.runtime / "gpuops" / "keepers").iterdir()) == []


@pytest.mark.parametrize("victims", [(1,), (0, 1)], ids=["one", "all"])
def test_killed_workers_go_on_from_memory_and_lose_next_to_nothing(tmp_path, undisturbed, victims):
    with Training(tmp_path, CALM) as run:
        run.wait_for_step(8)
        run.wait_for_kept(7)
        keeper = run.keeper()
        for rank in victims:
            os.kill(run.pid_of(rank), signal.SIGKILL)
        run.wait_for_step(12, generation=1)
        assert run.keepers() == [keeper]
        run.finished()

    assert_whole(run, undisturbed)
    assert_nothing_left(run)
    assert [(rank, tier) for rank, _, tier in sorted(run.loads())] == [
        (0, "memory"),
        (1, "memory"),
    ]
    (step,) = {step for _, step, _ in run.loads()}
    assert step >= 7
    # Each rank owns a part of what both load, so both images were mapped before.
    mapped = {(x.generation, x.number) for x in run.lines() if x.what == "mapped"}
    assert mapped == {(0, 0), (1, 2)}
    (incident,) = run.incidents()
    (went_on,) = [e["text"] for e in incident["evidence"] if e["role"] == "recovery"]
    assert went_on.startswith(f"resumed from step {step}: ranks 0-1 from memory; ")
    lost = incident["lost_seconds_by_phase"]
    assert 0 < lost["restore"] < lost["restore"] + lost["init"]
    assert f"resumed from step {step}" in run.said()
    (decided,) = run.payloads("decision.made")
    assert decided["decision"]["failure"]["checkpoint_step"] >= step
    counted = run.payloads("checkpoint.committed")
    assert sum(p["count"] for p in counted) + run_skips(run) >= STEPS - 2
    assert counted[-1]["step"] == STEPS


def run_skips(run):
    return sum(p["count"] for p in run.payloads("checkpoint.skipped"))


def test_an_agent_that_is_killed_is_followed_by_one_that_adopts_the_keeper(tmp_path, undisturbed):
    with Training(tmp_path, CALM) as first:
        first.wait_for_step(8)
        first.wait_for_kept(7)
        keeper, workers = first.keeper(), [first.pid_of(0), first.pid_of(1)]
        first.process.kill()
        first.process.wait()
        wait_until(lambda: not any(map(is_alive, workers)), what="the end of the workers")
        assert first.keepers() == [keeper]

    with Training(tmp_path, CALM, tries=1) as second:
        second.wait_for_step(12, generation=100)
        assert second.keepers() == [keeper]
        second.finished()

    assert_whole(second, undisturbed)
    assert_nothing_left(second)
    assert {(rank, tier) for rank, _, tier in second.loads()} == {(0, "memory"), (1, "memory")}
    assert min(step for _, step, _ in second.loads()) >= 7
    (told,) = second.payloads("checkpoint.keeper")
    assert (told["adopted"], told["pid"]) == (True, keeper)
    assert "in memory, left by a killed agent of this job" in second.said()


@pytest.mark.soak
def test_an_agent_killed_in_a_later_generation_is_followed_as_well(tmp_path, undisturbed):
    with Training(tmp_path, CALM) as first:
        first.wait_for_step(6)
        os.kill(first.pid_of(0), signal.SIGKILL)
        first.wait_for_step(12, generation=1)
        first.process.kill()
        first.process.wait()

    with Training(tmp_path, CALM, tries=1) as second:
        second.finished()

    assert_whole(second, undisturbed)
    assert_nothing_left(second)
    assert min(step for _, step, _ in second.loads()) >= 11


def test_another_command_does_not_adopt_it(tmp_path):
    with Training(tmp_path) as first:
        first.wait_for_step(4)
        first.process.kill()
        first.process.wait()
        (left,) = first.keepers()

    with Training(tmp_path, "--pause=0.01", tries=1, steps=6) as second:
        second.finished()
        assert second.loads() == []
        assert second.keepers() == [left]
    os.kill(left, signal.SIGKILL)


def test_a_drain_persists_the_newest_state_and_the_next_job_goes_on_from_it(tmp_path, undisturbed):
    flags = (f"--ckpt-dir={tmp_path / 'ckpt'}", "--drain-grace=60")
    # Slow enough for all ranks to hear of the step after which they stop.
    with Training(tmp_path, "--pause=0.2", flags=flags) as first:
        first.wait_for_step(4)
        first.signal(signal.SIGTERM)
        first.finished(85)
        assert_nothing_left(first)
        (flushed,) = first.payloads("checkpoint.flushed")
        assert flushed["fitted"], flushed
        assert flushed["directory"] == str(tmp_path / "ckpt")
        assert 0 < flushed["seconds"] <= flushed["within_s"] <= 60
        (incident,) = first.incidents()
        (said,) = [e["text"] for e in incident["evidence"] if e["role"] == "recovery"]
        assert f"the checkpoint of step {flushed['step']} persisted" in said
        assert said in first.said()
        last = max(x.number for x in first.lines() if x.what == "step")
        assert flushed["step"] == last

    assert last < STEPS
    with Training(tmp_path, flags=flags, tries=1) as second:
        second.finished()

    assert problems(second.lines(), STEPS) == []
    assert redone(second.lines()) == 0
    assert second.weights() == undisturbed
    assert sorted(second.loads()) == [(0, last, "persistent"), (1, last, "persistent")]


@pytest.mark.parametrize("every", [1, 1000])
def test_a_drain_of_a_script_that_never_asks_persists_the_step_at_which_all_stop(
    tmp_path, undisturbed, every
):
    flags = (f"--ckpt-dir={tmp_path / 'ckpt'}", "--drain-grace=60")
    words = ("--never-asks", f"--every={every}")
    with Training(tmp_path, "--pause=0.2", *words, flags=flags) as first:
        first.wait_for_step(4)
        first.signal(signal.SIGTERM)
        first.finished(85)
        assert_nothing_left(first)
        (flushed,) = first.payloads("checkpoint.flushed")
        assert flushed["fitted"], flushed
        assert first.payloads("run.ended")[0]["outcome"] == "preempted"
        (incident,) = first.incidents()
        assert incident["failure_class"] == "scheduler.preempted"

    step = flushed["step"]
    assert step > 4
    # Both ranks had made it, and were ended soon after.
    assert {x.rank for x in first.lines() if x.what == "step" and x.number == step} == {0, 1}
    with Training(tmp_path, *words, flags=flags, tries=1) as second:
        second.finished()

    assert second.weights() == undisturbed
    assert sorted(second.loads()) == [(0, step, "persistent"), (1, step, "persistent")]


def test_a_keeper_that_dies_is_followed_by_another_while_the_workers_train(tmp_path, undisturbed):
    # Slow enough for another keeper to have started well before the last step.
    with Training(tmp_path, "--pause=0.5") as run:
        run.wait_for_step(2)
        run.wait_for_kept(1)
        first = run.keeper()
        os.kill(first, signal.SIGKILL)
        died_at = max(x.number for x in run.lines() if x.what == "step")
        run.wait_for_kept(died_at + 2)
        (second,) = run.keepers()
        # Nobody was restarted for it.
        assert {x.generation for x in run.lines()} == {0}
        os.kill(run.pid_of(1), signal.SIGKILL)
        run.finished()

    assert second != first
    assert_whole(run, undisturbed)
    assert_nothing_left(run)
    assert {(rank, step > died_at, tier) for rank, step, tier in run.loads()} == {
        (0, True, "memory"),
        (1, True, "memory"),
    }
    began = run.payloads("checkpoint.keeper")
    assert [p["pid"] for p in began] == [first, second]
    assert 0 < began[1]["lost_step"] <= died_at + 1
    assert "keeper" in run.payloads("tool.failed")[0]["what"]
    assert f"(the last one known: step {began[1]['lost_step']})" in run.said()


def test_a_state_after_which_the_job_fails_twice_is_passed_over(tmp_path, undisturbed):
    with Training(tmp_path, "--poisoned=11") as run:
        run.finished()

    loads = [step for rank, step, _ in run.loads() if rank == 0]
    assert loads[0] == 11
    assert loads[1] < 11
    assert run.payloads("decision.made")[1]["decision"]["exclude_checkpoint"] == 11
    assert problems(run.lines(), STEPS) == []
    assert run.weights() == undisturbed


def test_while_it_trains_the_status_says_where_it_would_go_on(tmp_path):
    with Training(tmp_path, "--pause=0.2", steps=1000) as run:
        run.wait_for_step(4)

        def status():
            words = [sys.executable, "-m", "gpuops", "run", "status", "--json"]
            shown = subprocess.run(
                [*words, "--run-dir", run.runs], capture_output=True, text=True, check=True
            )
            found = json.loads(shown.stdout)["checkpoint"]
            return found if found and found["step"] else None

        kept = wait_until(status, what="a checkpoint in the status")
        assert kept["tier"] == "memory"
        assert kept["keeper"] == "running"
        assert kept["age_seconds"] < 30
        run.signal(signal.SIGINT)
        run.finish(LIMIT_S)
    assert_nothing_left(run)


def test_a_job_without_checkpoints_has_nothing_to_say_of_them(tmp_path):
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}
    tmp_path.chmod(0o700)
    with Run(tmp_path, "--health-gate=off", JOBS / "train.py", env=env) as run:
        assert run.finish(LIMIT_S) == 0, run.said()

    kinds = {event["kind"] for event in run.events() if event["kind"].startswith("checkpoint")}
    assert kinds == {"checkpoint.keeper"}
    assert "checkpoint" not in run.said()
    assert list((tmp_path / "gpuops" / "keepers").iterdir()) == []


def test_switched_off_there_is_no_keeper(tmp_path):
    with Training(tmp_path, flags=("--ckpt=off",), steps=6) as run:
        run.wait_for_step(2)
        assert run.keepers() == []
        run.finished()

    assert not (run.runtime / "gpuops").exists()
    assert run.payloads("checkpoint.keeper") == []


def test_a_folder_that_another_user_made_first_takes_no_states_away(tmp_path):
    """The exploit: ``mkdir /tmp/gpuops-UID``; the run ended with 0 and nothing had persisted."""
    taken = tmp_path / "tmp" / f"gpuops-{os.geteuid()}"
    taken.mkdir(parents=True)
    taken.chmod(0o777)
    directory, env = tmp_path / "ckpt", {"TMPDIR": str(taken.parent), "XDG_RUNTIME_DIR": ""}
    env["PYTHONNOUSERSITE"] = "1"  # so that it starts anew: a warm Python knows another TMPDIR
    with Training(tmp_path, CALM, flags=(f"--ckpt-dir={directory}",), env=env, steps=6) as run:
        run.finished()

    assert list(directory.glob("*/manifest.json"))
    assert f"other users may write {taken}" in run.err.read_text()


def test_a_run_that_cannot_persist_where_it_should_does_not_start(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import sys; sys.modules['xxhash'] = None")
    flags, env = (f"--ckpt-dir={tmp_path / 'ckpt'}",), {"PYTHONPATH": str(tmp_path / "site")}
    with Training(tmp_path / "run", flags=flags, env=env) as run:
        assert run.finish(LIMIT_S) == 64

    assert run.lines() == []
    (line,) = run.err.read_text().splitlines()
    assert "ckpt: the Python modules xxhash are missing; install them, or run without" in line


def test_a_second_job_in_one_directory_ends_at_once_with_one_error(tmp_path):
    """At launch where the agent knows the directory, else as soon as a worker names it."""
    directory = tmp_path / "ckpt"
    owner = DirectoryLock(directory, this_process())
    owner.acquire("the-first-job")
    flags = (f"--ckpt-dir={directory}",)
    with (
        Training(tmp_path / "told", flags=flags) as told,
        Training(tmp_path / "untold", "--directory", directory) as untold,
    ):
        codes = told.finish(LIMIT_S), untold.finish(LIMIT_S)

    assert codes == (64, 64), told.said() + untold.said()
    said = "another job saves into"
    assert [line for line in told.said().splitlines() if said in line and "the-first-job" in line]
    assert told.said().count(said) == 1
    assert untold.err.read_text().count("gpuops: the run failed: ") == 1
    assert told.lines() == untold.lines() == []
    for run in (told, untold):
        (decided,) = run.payloads("decision.made")
        assert decided["decision"]["rule"] == "checkpoint.dir_taken"
        (incident,) = run.incidents()
        assert incident["failure_class"] == "checkpoint.dir_taken"
    assert {path.name for path in directory.iterdir()} == {LOCK_NAME}


def test_what_a_checkpointer_refuses_ends_the_run_at_once_with_one_line(tmp_path):
    with Run(tmp_path, JOBS / "refused.py") as run:
        assert run.finish(LIMIT_S) == 64, run.said()

    (line,) = re.findall("gpuops: the run failed: (.*)", run.err.read_text())
    assert re.fullmatch(
        r"rank \d( on \S+)? raised ArgumentError: the model is a FullyShardedDataParallel "
        r"\(FSDP1\), which is not saved: shard it with fully_shard \(FSDP2\)"
        r"( \(with 1 more rank\))?; no restart: it would fail for the same reason",
        line,
    )
    assert "gpuops: WARNING" not in run.err.read_text()
    assert len(run.payloads("attempt.started")) == 1
    (incident,) = run.incidents()
    assert incident["failure_class"] == "checkpoint.refused"


def test_a_keeper_that_hangs_is_replaced_and_the_last_step_is_saved_all_the_same(tmp_path):
    flags = (f"--ckpt-dir={tmp_path / 'ckpt'}",)
    with Training(tmp_path, "--every=4", "--pause=1", flags=flags, steps=7) as run:
        run.wait_for_step(5)
        keeper = run.keeper()
        os.kill(keeper, signal.SIGSTOP)  # after the last save that is due
        run.finished()
        assert not is_alive(keeper)

    assert re.search(r"rank 0 weights \w+ after 7 steps", run.said())
    assert [p["outcome"] for p in run.payloads("run.ended")] == ["completed"]
    assert "the keeper of the checkpoints was ended (its keeper" in run.said()
    assert any("stopped by a signal" in p["error"] for p in run.payloads("tool.failed"))
    assert "the checkpoint of step 7 persisted" in run.said()
    assert max(path.name[:17] for path in (tmp_path / "ckpt").glob("step-*")) == (
        "step-000000000007"
    )
    assert_nothing_left(run)
