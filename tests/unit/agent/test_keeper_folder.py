"""Where the keeper of a job is found again, and that two living agents never share one."""

import contextlib
import fcntl
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.launches import requested, slurm_env
from support.small_disk import small_disk

from gpuops.agent.checkpoint.start import (
    KEPT_S,
    CheckpointJob,
    FolderError,
    check_can_persist,
    keeper_key,
    keeper_parents,
    runtime_parents,
    sweep,
    take_folder,
)
from gpuops.checkpoint.keeper.connection import LOCK_NAME, SOCKET_NAME
from gpuops.errors import UsageError

pytestmark = pytest.mark.torch
UID = os.geteuid()
C10D = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=head:29400")


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


def key(*words, env=None, node="n1", cwd="/home/ada"):
    return keeper_key(requested(*words, env=env), env or {}, node=node, cwd=cwd)


def test_the_same_command_is_the_same_job_whatever_terminal_it_is_typed_in(script):
    first = {"SSH_CONNECTION": "1", "XDG_SESSION_ID": "4", "LR": "1e-3", "OLDPWD": "/"}
    again = {"SSH_CONNECTION": "2", "XDG_SESSION_ID": "9", "LR": "1e-3", "SHLVL": "3"}

    assert key(script, env=first) == key(script, env=again)
    assert len(key(script)) == 16


def test_another_job_has_another_keeper(script, tmp_path):
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "train.py"
    other.touch()
    keys = [
        key(script),
        key(script, "--lr", "1"),
        key(str(other)),
        key(script, node="n2"),
        key(script, cwd="/tmp"),
        key("--nproc-per-node=2", script),
        key(script, env={"LR": "1e-3"}),  # a sweep that says it in the environment
        key(script, env={"LR": "1e-4"}),
        key("--rdzv-id=a", script),
        key("--rdzv-id=b", script),
        key("--rdzv-id=a", *C10D, script),
        key(*C10D, script),
        key(script, env=slurm_env("n1", 1)),
        key(script, env=slurm_env("n1", 1, SLURM_JOB_ID="82")),
    ]

    assert len(set(keys)) == len(keys)


def test_an_id_is_the_whole_identity(script):
    words = ("--rdzv-id=job7", *C10D)

    assert key(*words, script, "--steps", "5", env={"LR": "1"}) == key(*words, script, cwd="/x")


def test_a_step_of_slurm_that_starts_again_is_the_same_job(script):
    once = slurm_env("n1", 1)
    again = slurm_env("n1", 1, SLURM_RESTART_COUNT="1", SLURM_STEP_ID="3", SLURM_TASK_PID="77")

    assert key(script, env=once) == key(script, env=again)


def test_the_session_directory_comes_first():
    there = runtime_parents({"XDG_RUNTIME_DIR": "/run/user/7"}, Path("/tmp"), 7)

    assert there == [Path("/run/user/7/gpuops"), Path("/tmp/gpuops-7")]
    assert runtime_parents({"XDG_RUNTIME_DIR": "run"}, Path("/tmp"), 7) == [Path("/tmp/gpuops-7")]


def test_a_folder_is_private_and_found_again_by_the_next_agent(tmp_path):
    first = take_folder([tmp_path / "r"], "k", UID)
    (first.path / SOCKET_NAME).touch()
    os.close(first.lock)  # as when its holder is killed

    again = take_folder([tmp_path / "r"], "k", UID)

    assert again.path == first.path
    assert first.path.stat().st_mode & 0o777 == 0o700
    assert first.path.parent.stat().st_mode & 0o777 == 0o700
    again.release(remove=True)
    assert not again.path.exists()


def test_two_living_agents_of_one_command_have_one_each(tmp_path):
    parents = [tmp_path / "r"]
    first, second = take_folder(parents, "k", UID), take_folder(parents, "k", UID)
    assert first.path != second.path

    first.release(remove=True)
    (second.path / SOCKET_NAME).touch()
    os.close(second.lock)  # killed: its keeper waits there

    assert take_folder(parents, "k", UID).path == second.path
    assert take_folder(parents, "k", UID).path == first.path


def test_one_that_is_left_to_its_lease_stays(tmp_path):
    first = take_folder([tmp_path / "r"], "k", UID)
    (first.path / SOCKET_NAME).touch()
    first.release(remove=False)

    assert (first.path / SOCKET_NAME).exists()
    assert take_folder([tmp_path / "r"], "k", UID).path == first.path


def test_what_others_could_have_made_is_not_trusted(tmp_path):
    open_one, linked, taken = tmp_path / "open", tmp_path / "link", tmp_path / "taken"
    open_one.mkdir()
    open_one.chmod(0o777)
    (tmp_path / "elsewhere").mkdir()
    linked.symlink_to(tmp_path / "elsewhere")
    taken.write_text("")
    inner = tmp_path / "inner"
    (inner / "keepers").mkdir(parents=True, mode=0o755)

    for parent, why in (
        (open_one, "other users may write"),
        (linked, "not a folder of this user"),
        (taken, "not a folder of this user|File exists"),
        (inner, "other users may read"),
        (tmp_path / "no" / "such", "No such file"),
    ):
        with pytest.raises(FolderError, match=why):
            take_folder([parent], "k", UID)
    with pytest.raises(FolderError, match="not a folder of this user"):
        take_folder([tmp_path / "new"], "k", UID + 1)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_bad_parent_is_passed_over_for_a_good_one(tmp_path):
    open_one = tmp_path / "open"
    open_one.mkdir()
    open_one.chmod(0o777)

    assert take_folder([open_one, tmp_path / "r"], "k", UID).path.parent.parent == tmp_path / "r"


def test_folders_without_end_are_not_tried(tmp_path):
    held = [take_folder([tmp_path / "r"], "k", UID) for _ in range(64)]

    with pytest.raises(FolderError, match="64 agents of this command"):
        take_folder([tmp_path / "r"], "k", UID)
    assert len({folder.path for folder in held}) == 64
    for folder in held:
        folder.release(remove=True)


def test_what_dead_keepers_leave_goes_after_a_day_and_nothing_else_does(tmp_path):
    parents = [tmp_path / "r", tmp_path / "missing"]
    dead, held, waiting, young = (take_folder(parents, key, UID) for key in "abcd")
    for folder in (dead, waiting, young):
        (folder.path / "keeper.log").touch()
        folder.release(remove=False)
    keeper = os.open(waiting.path / LOCK_NAME, os.O_RDWR | os.O_CREAT)
    fcntl.flock(keeper, fcntl.LOCK_EX)
    now_s = time.time()
    for folder in (dead, held, waiting):
        os.utime(folder.path, (now_s - KEPT_S, now_s - KEPT_S))

    sweep(parents, UID, now_s + 1)

    assert not dead.path.exists()
    assert held.path.exists()
    assert waiting.path.exists()
    assert young.path.exists()
    os.close(keeper)


def test_a_link_in_its_place_leads_no_sweep_into_other_folders(tmp_path):
    """The exploit: in ``/tmp``, ``gpuops-UID/keepers`` of an attacker points to a user's home."""
    keys = tmp_path / "home" / ".ssh"
    keys.mkdir(parents=True, mode=0o700)
    (keys / "id_ed25519").touch()
    tmp = tmp_path / "tmp"
    for parent in (tmp / "opened", tmp / "linked"):
        parent.mkdir(parents=True)
        (parent / "keepers").symlink_to(tmp_path / "home")
    (tmp / "opened").chmod(0o777)
    (tmp / "whole").symlink_to(tmp / "linked")
    os.utime(keys, (1.0, 1.0))

    sweep([tmp / "opened", tmp / "linked", tmp / "whole"], UID, time.time())

    assert [path.name for path in keys.iterdir()] == ["id_ed25519"]


def attacked_job(tmp_path, script, *flags):
    """Return a job whose folder in the temporary directory anyone may write."""
    (tmp_path / "tmp" / f"gpuops-{UID}").mkdir(parents=True)
    (tmp_path / "tmp" / f"gpuops-{UID}").chmod(0o777)
    return CheckpointJob(
        request=requested(*flags, script),
        name="job",
        env={},
        node="n1",
        cwd="/",
        uid=UID,
        temporary=tmp_path / "tmp",
        state_dir=tmp_path / "state",
    )


def test_where_another_user_was_first_it_is_in_the_state_directory_or_in_a_new_one(
    tmp_path, script
):
    job = attacked_job(tmp_path, script)
    parents = keeper_parents(job)
    first = take_folder(parents, "k", UID, job.temporary)
    first.release(remove=False)
    parents[-1].chmod(0o777)
    second = take_folder(parents, "k", UID, job.temporary)

    assert first.path.is_relative_to(tmp_path / "state" / "keepers-n1")
    assert [str(tmp_path / "tmp") in text for text in first.problems] == [True]
    assert second.path.is_relative_to(tmp_path / "tmp")
    assert second.made.stat().st_mode & 0o777 == 0o700
    assert len(second.problems) == 2
    second.release(remove=True)
    assert [path.name for path in job.temporary.iterdir()] == [f"gpuops-{UID}"]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("file", "write into .*/file: Not a directory: it is a file"),
        ("file/below/it", "write into .*/file: Not a directory: it is a file"),
        ("link/below", "write into .*/link: No such file or directory"),
        ("/proc/states", "write into /proc: "),
    ],
)
def test_a_directory_that_can_never_be_written_is_refused_at_start(tmp_path, script, place, said):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    job = attacked_job(tmp_path, script, f"--ckpt-dir={tmp_path / place}")

    with pytest.raises(UsageError, match=f"cannot persist in .*: cannot {said}.*; name one"):
        check_can_persist(job)
    check_can_persist(replace(job, request=requested(script)))


@pytest.mark.parametrize("place", ["states", "deep/below"])
def test_trying_a_directory_leaves_nothing_behind(tmp_path, script, place, caplog):
    (tmp_path / "states").mkdir()
    check_can_persist(attacked_job(tmp_path, script, f"--ckpt-dir={tmp_path / place}"))

    there = {path.name for path in tmp_path.iterdir()}
    assert there == {"states", "train.py", "tmp", "state"}, "but for those of the keeper"
    assert list((tmp_path / "states").iterdir()) == []
    assert not caplog.records


@pytest.mark.skipif(UID != 0, reason="mounts a file system")
def test_a_full_disk_at_start_is_a_warning(tmp_path, script, caplog):
    with small_disk(tmp_path / "disk", "1m") as disk:
        job = attacked_job(tmp_path, script, f"--ckpt-dir={disk / 'states'}")
        with contextlib.suppress(OSError), (disk / "fills").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(65536))
        check_can_persist(job)

    (record,) = caplog.records
    assert "now, and are tried again: cannot write into" in record.getMessage()
    assert "No space left on device: free some space" in record.getMessage()


def test_a_directory_in_which_nothing_can_persist_is_refused_at_start(
    tmp_path, script, monkeypatch
):
    flag = f"--ckpt-dir={tmp_path / 'states'}"
    job = attacked_job(tmp_path, script, flag)
    check_can_persist(job)
    assert list(job.temporary.iterdir()) == [tmp_path / "tmp" / f"gpuops-{UID}"]

    (tmp_path / "blocked").touch()
    no_place = replace(job, temporary=tmp_path / "blocked", state_dir=tmp_path / "blocked" / "s")
    with pytest.raises(UsageError, match=r"states: no folder is private enough .*blocked"):
        check_can_persist(no_place)
    check_can_persist(replace(no_place, request=requested(script)))
    check_can_persist(replace(no_place, request=requested(flag, "--ckpt=off", script)))
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(UsageError, match="the Python modules xxhash are missing; install them"):
        check_can_persist(job)
