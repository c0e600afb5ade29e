"""Without `gpuops run` a job keeps its states by itself, in memory and in its directory."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.gloo_ranks import run_ranks, run_script, said
from support.runs import JOBS
from support.same_state import same

from gpuops.checkpoint.keeper.agent_client import KeeperClient
from gpuops.checkpoint.storage.address import open_store
from gpuops.checkpoint.storage.inspection import verify_state

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]
HALF, ALL = 3, 6
SOCKET = "keeper.sock"


def sockets_below(folder):
    """Return the sockets of keepers, any of which may be ending and remove its folder meanwhile."""
    return [Path(at) / name for at, _, names in os.walk(folder) for name in names if name == SOCKET]


@pytest.fixture
def home(tmp_path):
    """A runtime directory of its own, whose keepers are ended."""
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    yield {"XDG_RUNTIME_DIR": str(runtime)}
    for socket in sockets_below(runtime):
        try:
            link = KeeperClient.connect(socket)
        except Exception:  # noqa: BLE001 it ended by itself
            continue
        link.shut_down()
        link.close()


def job(folder, name, **more):
    return {"kind": "ddp", "name": name, "directory": str(folder / "states"), **more}


def test_a_killed_job_goes_on_from_memory_and_the_last_state_persists(tmp_path, home):
    first = job(tmp_path, "first", reference=ALL, until=HALF, every=HALF, die=True)
    before = run_ranks(tmp_path, 2, first, env=home)
    after = run_ranks(tmp_path, 2, job(tmp_path, "second", until=ALL), env=home)

    for one, two in zip(before, after, strict=True):
        assert (two["start"], two["restored"]["tier"]) == (HALF, "memory")
        assert one["losses"] + two["losses"] == one["reference"]
        assert same(two["state"], one["reference_state"])
    assert said(tmp_path, 2, "second").count("the job is not restarted") == 1
    store = open_store(str(tmp_path / "states"))
    newest = store.list_states()[0]
    assert newest.state.step == ALL
    assert verify_state(store, newest.state) == []


def test_the_directory_alone_is_enough(tmp_path, home):
    first = job(tmp_path, "first", reference=ALL, until=HALF)
    before = run_ranks(tmp_path, 2, first, env=home)
    elsewhere = tmp_path / "another node"
    elsewhere.mkdir(mode=0o700)
    second = job(tmp_path, "second", until=ALL)
    after = run_ranks(tmp_path, 2, second, env={"XDG_RUNTIME_DIR": str(elsewhere)})

    for one, two in zip(before, after, strict=True):
        assert (two["start"], two["restored"]["tier"]) == (HALF, "persistent")
        assert one["losses"] + two["losses"] == one["reference"]
        assert same(two["state"], one["reference_state"])


def test_a_flipped_bit_is_a_warning_of_the_first_rank(tmp_path, home):
    """Of two ranks either may be wrong; what an agent would record is only said."""
    env = {**home, "GPUOPS_CKPT_DIR": str(tmp_path / "states")}
    codes = run_script(tmp_path, 2, JOBS / "flipped.py", "flipped", env=env)
    words = said(tmp_path, 2, "flipped")
    assert codes == [0, 0], words
    (flipped,) = map(int, re.findall(r"flipped after step (\d+)", words))
    (found,) = re.findall(
        r"replicas of the training state differ: ranks 0-1, which must be equal, differ in "
        r"model\.3\.weight at step (\d+) \(equal at step (\d+)\): either may be wrong",
        words,
    )

    assert int(found[1]) <= flipped < int(found[0])
    assert "replicas" not in (tmp_path / "log-1-flipped").read_text()
    assert words.count("replicas of the training state differ") == 1


ENDS = """
import sys, torch, gpuops
torch.set_num_threads(1)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.AdamW(model.parameters())
ck = gpuops.Checkpointer(model=model, optimizer=optimizer, every=5, directory=sys.argv[1])
ck.restore()
for n in range(1, 8):
    optimizer.zero_grad()
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    ck.step(n)
if sys.argv[2] == "fails":
    raise ValueError("a bug")
"""


def test_a_script_that_closes_nothing_has_its_last_step_saved_unless_it_fails(tmp_path, home):
    ways = {"ends": 0, "fails": 1}
    running = {}
    for way in ways:
        argv = [sys.executable, "-c", ENDS, str(tmp_path / way), way]
        running[way] = subprocess.Popen(argv, env=_env(home), stderr=subprocess.PIPE, text=True)
    for way, code in ways.items():
        _out, err = running[way].communicate(timeout=200)
        assert running[way].returncode == code, err

    steps = {
        way: {s.state.step for s in open_store(str(tmp_path / way)).list_states()} for way in ways
    }
    assert 7 in steps["ends"]
    assert steps["fails"] <= {5}


HOLDS = """
import sys, torch, gpuops
ck = gpuops.Checkpointer(model=torch.nn.Linear(1, 1), every=1, directory=sys.argv[1])
print(ck.restore(), flush=True)
sys.stdin.readline()
"""


def test_two_jobs_in_one_directory_do_not_load_each_others_states(tmp_path, home):
    argv = [sys.executable, "-c", HOLDS, str(tmp_path / "states")]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    first = subprocess.Popen(argv, env=_env(home), text=True, **streams)
    try:
        assert first.stdout.readline().strip() == "0"
        second = subprocess.run(
            argv, env=_env(home), text=True, capture_output=True, timeout=200, check=False
        )
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()

    assert second.returncode == 1
    assert "another job (pid" in second.stderr
    assert str(first.pid) in second.stderr


def _env(home):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("GPUOPS_")}
    return kept | home | {"PYTHONPATH": str(Path(__file__).parents[2])}
