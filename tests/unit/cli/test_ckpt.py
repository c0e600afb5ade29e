"""``gpuops ckpt ls|show|verify|prune|pin|unpin``: what they say, and their exit codes."""

import json
import os
import pty
import subprocess
import sys

import pytest
import torch
from support.command import gpuops as in_a_process
from support.made_states import make_state, part, whole

from gpuops.checkpoint.storage.directory import DirectoryStore
from gpuops.checkpoint.types import Shard, StateId
from gpuops.cli.main import run_command

W = torch.arange(24.0).reshape(6, 4)
RANKS = [
    {"model.w": part(W, slice(0, 4)), "model.b": whole(torch.ones(3).bfloat16())},
    {"model.w": part(W, slice(4, 6)), "model.b": whole(torch.ones(3).bfloat16())},
]


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path / "states")


@pytest.fixture
def ckpt(capsys, store):
    """Return what runs ``gpuops ckpt`` here: (exit code, output, errors)."""

    def run(*words, address=True):
        at = ["--dir", store.address] if address and words[0] != "ls" else []
        at = [store.address] if words[0] == "ls" and address else at
        code = run_command(["ckpt", *words, *at])
        return code, *capsys.readouterr()

    return run


def damage(store, state, shard, offset=-1):
    path = store.local_shard_path(state, shard)
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_ls_has_the_newest_first_and_marks_what_is_pinned_or_not_whole(store, ckpt):
    old = make_state(store, RANKS, step=10)
    make_state(store, RANKS, step=20)
    again = make_state(store, RANKS, step=15, epoch=1)
    store.pin(old, "paper")
    store.local_shard_path(again, Shard(1, 2)).unlink()
    for record in store.read_manifest(old).shards:
        store.read_back(record, old)

    code, out, _ = ckpt("ls")
    rows = [line.split() for line in out.splitlines()[1:]]

    assert code == 0
    assert [row[0] for row in rows[:3]] == ["15", "20", "10"]
    assert "DAMAGED" in out.splitlines()[1]
    assert "sizes ok" in out.splitlines()[2]
    assert "DAMAGED: step-000000000015.e00001: shard-00001-of-00002.safetensors: it is" in out
    assert "`gpuops ckpt verify` checks the content" in out
    assert "paper" in out.splitlines()[3]
    assert "verified" in rows[2]


def test_ls_json(store, ckpt):
    state = make_state(store, RANKS, step=10, job="j", generation=4)
    store.pin(state, "paper")
    (store._root / "step-000000000099.e00000").mkdir()

    code, out, _ = ckpt("ls", "--json")
    body = json.loads(out)

    assert code == 0
    assert body["schema"] == "gpuops.checkpoints/1"
    (item,) = body["checkpoints"]
    manifest = store.read_manifest(state)
    assert item == {
        "name": "step-000000000010.e00000",
        "step": 10,
        "epoch": 0,
        "created": manifest.created,
        "world": 2,
        "size_bytes": manifest.nbytes,
        "pins": ["paper"],
        "complete": True,
        "verified": False,
        "problems": [],
        "job": "j",
        "generation": 4,
        "written_by": manifest.version,
    }
    assert [entry["name"] for entry in body["damaged"]] == ["step-000000000099.e00000"]


def test_ls_of_nothing(ckpt, store):
    missing = f"no states in {store.address}: there is no such directory\n"
    assert ckpt("ls")[:2] == (0, missing)
    store._root.mkdir()
    assert ckpt("ls")[:2] == (0, f"no states in {store.address}\n")
    assert json.loads(ckpt("ls", "--json")[1])["checkpoints"] == []


@pytest.mark.parametrize("words", [["ls"], ["verify", "--dir"], ["prune", "--dir"]])
def test_an_address_that_is_none_is_a_usage_error(capsys, words):
    code = run_command(["ckpt", *words, "foo://x"])

    assert code == 64
    assert "unknown protocol 'foo'" in capsys.readouterr().err
    assert run_command(["ckpt", *words, "s3://"]) == 64
    assert "s3:// is incomplete; use s3://bucket/name" in capsys.readouterr().err


def test_the_directory_is_the_configured_one(ckpt, store, monkeypatch):
    make_state(store, RANKS, step=7)
    monkeypatch.setenv("GPUOPS_CKPT_DIR", store.address)
    assert "step-000000000007" in ckpt("ls", address=False)[1]
    monkeypatch.delenv("GPUOPS_CKPT_DIR")

    code, _, err = ckpt("ls", address=False)

    assert code == 64
    assert "GPUOPS_CKPT_DIR" in err


ALONE = [{"model.w": whole(W)}]
CHOSEN = {
    "steps": 262,
    "step_s": 0.5,
    "stall_s": 0.015,
    "restore_s": 30.0,
    "n_nodes": 2,
    "failures": 3,
    "node_hours": 24_000.0,
}


def said_beside(chosen):
    return json.dumps({"parts": {}, "auto": chosen}).encode()


def test_show_tells_which_interval_was_chosen_and_by_what(store, ckpt):
    make_state(store, ALONE, extras=[said_beside(CHOSEN)])

    code, out, _ = ckpt("show")

    assert code == 0
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert lines["every"] == (
        "every    auto: every 262 steps (2 min 11 s); stall 0.01 s, restore 30.0 s, step 0.50 s"
    )
    assert "failures per 1000 node days: 3 in 1e+03 node days on record" in lines["failures"]
    assert lines["failures"].endswith("; 2 nodes")
    body = json.loads(ckpt("show", "--json")[1])["interval"]
    assert (body["every"], body["steps"], body["seconds"]) == ("auto", 262, 131.0)
    assert (body["stall_s"], body["restore_s"], body["nodes"]) == (0.015, 30.0, 2)
    assert body["failures"]["failures"] == 3


def test_show_says_that_nothing_was_measured_yet(store, ckpt):
    unknown = dict.fromkeys(("steps", "step_s", "stall_s"))
    first = {**CHOSEN, **unknown, "failures": 0, "node_hours": 0.0, "n_nodes": 1}
    make_state(store, ALONE, extras=[said_beside(first)])

    out = ckpt("show")[1]

    assert "auto: no save was measured yet; restore 30.0 s" in out
    assert "none are on record; 1 node\n" in out


@pytest.mark.parametrize(
    "extra",
    [
        b"{}",
        b"[]",
        b"\xff",
        b"[" * 4000,
        said_beside(None),
        said_beside({**CHOSEN, "steps": "262"}),
        said_beside({**CHOSEN, "stall_s": -1}),
        said_beside({**CHOSEN, "step_s": 1e300}),
        said_beside({**CHOSEN, "n_nodes": True}),
    ],
)
def test_what_says_nothing_of_an_interval_is_shown_without(store, ckpt, extra):
    make_state(store, ALONE, extras=[extra])

    code, out, err = ckpt("show")

    assert (code, err) == (0, "")
    assert "every " not in out
    assert json.loads(ckpt("show", "--json")[1])["interval"] is None


def test_show_tells_tensors_and_how_they_are_cut(store, ckpt):
    make_state(store, RANKS, step=10)

    code, out, _ = ckpt("show")

    assert code == 0
    line = next(line for line in out.splitlines() if line.endswith("model.w"))
    assert line.split()[:4] == ["F32", "6", "x", "4"]
    assert "2 along 0" in line
    body = json.loads(ckpt("show", "10", "--json")[1])
    assert body["schema"] == "gpuops.checkpoint-state/1"
    tensors = {item["name"]: item for item in body["tensors"]}
    assert tensors["model.w"]["parts"] == [
        {"rank": 0, "offsets": [0, 0], "shape": [4, 4]},
        {"rank": 1, "offsets": [4, 0], "shape": [2, 4]},
    ]
    assert tensors["model.b"] | {"parts": []} == {
        "name": "model.b",
        "dtype": "BF16",
        "shape": [3],
        "size_bytes": 6,
        "sharding": "whole",
        "copies": 2,
        "parts": [],
    }
    assert [shard["rank"] for shard in body["shards"]] == [0, 1]


@pytest.mark.parametrize("wanted", ["newest", "12", "step-000000000012.e00003"])
def test_a_state_goes_by_several_names(store, ckpt, wanted):
    make_state(store, RANKS, step=12, epoch=1)
    make_state(store, RANKS, step=12, epoch=3)

    body = json.loads(ckpt("show", wanted, "--json")[1])

    assert body["checkpoint"]["name"] == "step-000000000012.e00003"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [("13", "newest are of the steps 12"), ("../x", "is no state"), ("\x1b[2J", "is no state")],
)
def test_a_state_that_is_not_there(store, ckpt, wanted, message):
    make_state(store, RANKS, step=12)

    code, _, err = ckpt("show", wanted)

    assert code == 64
    assert message in err
    assert "\x1b" not in err


def test_a_damaged_state_is_named_as_such(store, ckpt):
    state = make_state(store, RANKS, step=12)
    manifest = store._root / state.name / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"world": 2', '"world": 3'))

    code, _, err = ckpt("show", "12")

    assert code == 70
    assert "damaged" in err


def test_verify_is_0_for_whole_and_1_for_damaged(store, ckpt):
    old = make_state(store, RANKS, step=12)
    make_state(store, RANKS, step=13)
    assert ckpt("verify")[0] == 0
    damage(store, old, Shard(1, 2))

    assert ckpt("verify")[0] == 0
    code, out, _ = ckpt("verify", "12", "13")
    assert code == 1
    assert "step-000000000012.e00000: DAMAGED" in out
    assert "step-000000000013.e00000: intact" in out
    body = json.loads(ckpt("verify", "--all", "--json")[1])
    assert body["schema"] == "gpuops.checkpoint-verify/1"
    assert [item["whole"] for item in body["checkpoints"]] == [True, False]
    assert body["checkpoints"][1]["problems"][0]["kind"] == "flipped"


def test_a_state_that_verify_finds_damaged_is_verified_no_more(store, ckpt):
    state = make_state(store, RANKS, step=12)
    for record in store.read_manifest(state).shards:
        store.read_back(record, state)
    assert ckpt("verify")[0] == 0
    assert json.loads(ckpt("ls", "--json")[1])["checkpoints"][0]["verified"]
    damage(store, state, Shard(1, 2))

    assert ckpt("verify")[0] == 1
    assert not json.loads(ckpt("ls", "--json")[1])["checkpoints"][0]["verified"]


def test_damage_that_verify_found_is_listed_until_it_finds_none(store, ckpt):
    state = make_state(store, RANKS, step=12)
    path = store.local_shard_path(state, Shard(1, 2))
    intact = path.read_bytes()
    damage(store, state, Shard(1, 2))
    assert ckpt("verify")[0] == 1
    assert f"DAMAGED: {state.name}: {path.name}: it was not what was saved" in ckpt("ls")[1]

    path.write_bytes(intact)
    assert ckpt("verify")[0] == 0
    assert "DAMAGED" not in ckpt("ls")[1]


def test_prune_keeps_as_many_as_asked_besides_a_damaged_one(store, ckpt):
    for step in (1, 2, 3, 4):
        make_state(store, RANKS, step=step)
    damage(store, StateId(0, 4), Shard(0, 2))

    assert ckpt("prune", "--keep-last", "2", "--yes")[0] == 0
    assert states_of(store) == [4, 3, 2]


def test_a_newest_state_that_is_damaged_is_not_passed_over_by_verify(store, ckpt):
    make_state(store, RANKS, step=12)
    state = make_state(store, RANKS, step=13)
    manifest = store._root / state.name / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"world": 2', '"world": 3'))

    for words in ([], ["13"], [state.name]):
        code, out, _ = ckpt("verify", *words)
        assert (code, out.splitlines()[0]) == (1, f"{state.name}: DAMAGED")
    assert ckpt("verify", "12")[0] == 0


def test_who_takes_the_newest_is_told_that_a_newer_one_is_damaged(store, ckpt, tmp_path):
    make_state(store, ALONE, step=12)
    state = make_state(store, ALONE, step=13)
    manifest = store._root / state.name / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"world": 1', '"world": 2'))

    for words in (["show"], ["export", "--to", str(tmp_path / "x")]):
        code, out, err = ckpt(*words)
        assert code == 0
        assert out.startswith("step 12 (epoch 0)")
        assert f"gpuops: {state.name} is damaged, using the newest state before it: " in err
    assert ckpt("show", "12")[2] == ""


@pytest.mark.parametrize("words", [["ls"], ["verify"], ["show"], ["prune"], ["pin", "3"]])
def test_a_file_in_place_of_a_directory_is_a_usage_error(store, ckpt, words):
    store._root.write_text("hello")

    code, out, err = ckpt(*words)

    assert (code, out) == (64, "")
    assert err == f"gpuops: {store.address} is a file: expected a directory of states\n"


def test_a_state_of_a_later_version_is_not_called_damaged(store, ckpt):
    make_state(store, RANKS, step=12)
    state = make_state(store, RANKS, step=13)
    manifest = store._root / state.name / "manifest.json"
    manifest.write_text(manifest.read_text().replace("gpuops.checkpoint/1", "gpuops.checkpoint/2"))

    assert f"cannot be read: {state.name}: " in ckpt("ls")[1]
    code, out, _ = ckpt("verify")
    assert (code, out.splitlines()[0]) == (3, f"{state.name}: COULD NOT BE READ")
    assert "Install the gpuops that wrote it" in out
    assert "damaged" not in ckpt("show", "13")[2]
    out = ckpt("prune", "--keep-last", "1", "--yes")[1]
    assert f"skipped {state.name}" in out
    assert (store._root / state.name).is_dir()


@pytest.mark.parametrize("words", [["show"], ["export", "--to", "out.safetensors"]])
def test_a_shard_that_was_cut_short_or_is_gone_is_told_with_its_sizes(store, ckpt, words):
    state = make_state(store, RANKS, step=12)
    path = store.local_shard_path(state, Shard(1, 2))
    nbytes = path.stat().st_size
    os.truncate(path, 100)
    assert f"has 100 bytes; {nbytes} bytes were saved" in ckpt(*words)[2]
    path.unlink()
    assert f"shard-00001-of-00002.safetensors of {state}" in ckpt(*words)[2]


def test_a_directory_in_the_wrong_place_is_told_where_it_goes(store, ckpt, tmp_path):
    make_state(store, RANKS, step=12)

    assert f"say --dir {tmp_path}" in ckpt("verify", str(tmp_path))[2]
    assert ckpt("ls", "--dir", store.address, address=False)[0] == 0
    assert ckpt("ls", "--dir", store.address)[0] == 64


@pytest.mark.parametrize("words", [["ls"], ["verify"], ["prune"], ["pin", "3"]])
def test_a_directory_that_is_not_there_is_said(store, ckpt, words):
    assert "there is no such directory" in "".join(ckpt(*words)[1:])


def test_verify_all_counts_what_has_no_manifest(store, ckpt):
    make_state(store, RANKS, step=12)
    (store._root / "step-000000000099.e00000").mkdir()

    assert ckpt("verify", "--all")[0] == 1


def test_a_state_that_may_not_be_read_hides_no_other(store):
    make_state(store, RANKS, step=12)
    state = make_state(store, RANKS, step=13)
    (store._root / state.name).chmod(0)
    # Root reads all; without these capabilities it is a user like others.
    as_user = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    command = [sys.executable, "-m", "gpuops", "ckpt", "ls", store.address]
    done = subprocess.run(
        [*(as_user if os.geteuid() == 0 else []), *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "step-000000000012.e00000" in done.stdout.splitlines()[1]
    assert f"cannot be read: {state.name}: cannot read " in done.stdout
    assert "Permission denied" in done.stdout


def test_verify_is_3_where_it_cannot_be_judged(tmp_path, capsys):
    (tmp_path / "file").touch()

    assert run_command(["ckpt", "verify", "--dir", str(tmp_path / "file" / "states")]) == 3
    assert "file" in capsys.readouterr().err


def test_verify_refuses_contradiction(store, ckpt):
    make_state(store, RANKS)
    assert ckpt("verify", "1", "--all")[0] == 64


def test_progress_is_shown_on_a_terminal_only(store):
    make_state(store, RANKS, step=12)
    command = ["ckpt", "verify", "--dir", store.address]
    piped = in_a_process(*command)
    assert piped.stderr == ""

    main, side = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "gpuops", *command],
        stdout=subprocess.PIPE,
        stderr=side,
        env={**os.environ, "TERM": "xterm"},
    ) as child:
        os.close(side)
        shown = b""
        while chunk := _read(main):
            shown += chunk
        assert child.stdout.read() == piped.stdout.encode()
    os.close(main)
    assert b"step 12" in shown


def _read(fd):
    try:
        return os.read(fd, 65536)
    except OSError:  # EIO: the other side of a terminal is closed
        return b""


def states_of(store):
    return [stored.state.step for stored in store.list_states()]


def test_prune_says_what_and_why_and_a_dry_run_removes_nothing(store, ckpt):
    for step in range(10, 70, 10):
        make_state(store, RANKS, step=step)
    store.pin(StateId(0, 10), "paper")

    code, out, _ = ckpt("prune", "--keep-last", "2", "--keep-every", "30", "--dry-run")

    assert code == 0
    assert [line.split()[:2] for line in out.splitlines()] == [
        ["keep", "step-000000000060.e00000"],
        ["keep", "step-000000000050.e00000"],
        ["remove", "step-000000000040.e00000"],
        ["keep", "step-000000000030.e00000"],
        ["remove", "step-000000000020.e00000"],
        ["keep", "step-000000000010.e00000"],
    ]
    assert "pinned by paper" in out
    assert len(states_of(store)) == 6

    assert ckpt("prune", "--keep-last", "2", "--keep-every", "30", "--yes")[0] == 0
    assert states_of(store) == [60, 50, 30, 10]


def test_prune_asks_and_refuses_where_nobody_can_answer(store):
    for step in (1, 2):
        make_state(store, RANKS, step=step)

    ended = in_a_process("ckpt", "prune", "--keep-last", "1", "--dir", store.address)

    assert ended.returncode == 64
    assert "--yes" in ended.stderr
    assert states_of(store) == [2, 1]


def test_prune_never_removes_the_newest_whole_one(store, ckpt):
    for step in (1, 2, 3):
        make_state(store, RANKS, step=step)
    damage(store, StateId(0, 3), Shard(0, 2))

    code, out, _ = ckpt("prune", "--keep-last", "1", "--yes")

    assert code == 0
    assert states_of(store) == [3, 2]
    assert "the newest that was verified" in out


def test_prune_removes_nothing_where_none_is_whole(store, ckpt):
    for step in (1, 2):
        make_state(store, RANKS, step=step)
        damage(store, StateId(0, step), Shard(0, 2))

    assert ckpt("prune", "--keep-last", "1", "--yes")[0] == 0
    assert states_of(store) == [2, 1]


def test_prune_json(store, ckpt):
    for step in (1, 2):
        make_state(store, RANKS, step=step)

    body = json.loads(ckpt("prune", "--keep-last", "1", "--yes", "--json")[1])

    assert body["schema"] == "gpuops.checkpoint-prune/1"
    assert [(item["step"], item["keep"], item["removed"]) for item in body["checkpoints"]] == [
        (2, True, False),
        (1, False, True),
    ]


@pytest.mark.parametrize("ladder", ["1h", "2d:1d", "x:y", "1h:24h,,"])
def test_a_ladder_that_is_none(store, ckpt, ladder):
    make_state(store, RANKS)
    assert ckpt("prune", "--ladder", ladder, "--yes")[0] == 64


def test_prune_by_a_ladder(store, ckpt):
    for step in (1, 2, 3):
        make_state(store, RANKS, step=step)

    assert ckpt("prune", "--keep-last", "1", "--ladder", "1h:24h", "--yes")[0] == 0
    assert states_of(store) == [3], "all three are of one hour"
    assert ckpt("prune", "--ladder", "default", "--yes")[0] == 0


def test_pin_and_unpin(store, ckpt):
    make_state(store, RANKS, step=1)
    make_state(store, RANKS, step=2)

    assert ckpt("pin", "1", "--tag", "paper")[0] == 0
    assert ckpt("prune", "--keep-last", "1", "--yes")[0] == 0
    assert states_of(store) == [2, 1]
    assert "no longer" in ckpt("unpin", "1", "--tag", "paper")[1]
    assert "was not" in ckpt("unpin", "1", "--tag", "paper")[1]
    ckpt("prune", "--keep-last", "1", "--yes")
    assert states_of(store) == [2]
    assert ckpt("pin", "2", "--tag", "a/b")[0] == 64


def test_help_lists_the_commands_and_imports_no_torch(tmp_path):
    make_state(DirectoryStore(tmp_path / "s"), RANKS)
    code = (
        "import sys\n"
        "from gpuops.cli.main import run_command\n"
        "for words in (['--help'], ['ls', sys.argv[1]], ['show', '--dir', sys.argv[1]],"
        " ['verify', '--dir', sys.argv[1]]):\n"
        "    assert run_command(['ckpt', *words]) == 0\n"
        "assert not {'torch', 'numpy', 'safetensors', 'fsspec'} & sys.modules.keys()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "s")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    for name in ("export", "import", "ls", "pin", "prune", "show", "unpin", "verify"):
        assert f"\n  {name} " in ended.stdout


@pytest.mark.parametrize("missing", ["blake3", "xxhash"])
def test_a_module_that_is_missing_is_named(tmp_path, missing):
    code = (
        "import sys\n"
        f"sys.modules[{missing!r}] = None\n"
        "from gpuops.cli.main import run_command\n"
        "sys.exit(run_command(['ckpt', 'verify', '--dir', sys.argv[1]]))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )

    assert ended.returncode == 64
    assert f"the Python module {missing}, which is missing: pip install {missing}\n" in ended.stderr
