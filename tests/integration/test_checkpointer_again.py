"""A keeper that dies under a script that trains: it is found again, and no step waits for it."""

import itertools
import os
import signal
import threading
import time

import pytest
from support.keeper_ranks import until

pytest.importorskip("torch", reason="a Checkpointer needs torch")

import torch
from torch import nn

from gpuops import Checkpointer
from gpuops.checkpoint.keeper.agent_client import KeeperClient
from gpuops.checkpoint.keeper.connection import KeeperConnection, keeper_socket_path
from gpuops.checkpoint.keeper.process import start_or_adopt
from gpuops.worker.keeper_finder import standalone_folder

pytestmark = pytest.mark.torch
STEP_S = 15.0  # of a step that waits for nothing, on a busy machine; the keeper's deadline is 30 s


class Node:
    """A keeper's process and what an agent says to it."""

    def __init__(self, folder):
        self.folder = folder
        self.process = self.agent = None

    def start(self, epoch=None, generation=0):
        self.process = start_or_adopt(self.folder, lease_s=30.0)
        self.agent = KeeperClient.connect(self.process.socket_path)
        self.agent.begin_generation(generation, 1, None)
        if epoch is not None:
            self.agent.take_over(epoch)

    def kill(self):
        self.process.kill()
        self.agent.close()


@pytest.fixture
def node(tmp_path, monkeypatch):
    node = Node(tmp_path / "keeper")
    monkeypatch.setenv("GPUOPS_KEEPER", str(keeper_socket_path(node.folder)))
    monkeypatch.setenv("GPUOPS_GENERATION", "0")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GPUOPS_CKPT_DIR"):
        monkeypatch.delenv(name, raising=False)
    yield node
    if node.process is not None:
        node.kill()


def is_searching():
    return any(thread.name == "gpuops-find-keeper" for thread in threading.enumerate())


def test_saving_goes_on_with_another_keeper_and_no_step_waits_for_it(node, monkeypatch, caplog):
    node.start()
    model = nn.Linear(1, 1, bias=False)
    with Checkpointer(model=model, every=1) as ck:
        assert ck.restore() == 0
        numbers = iter(range(1, 10**6))

        def step():
            n = next(numbers)
            with torch.no_grad():
                model.weight.fill_(n)
            ck.step(n)
            return ck.stats

        until(lambda: step()["saved"] >= 2)
        until(lambda: node.agent.stats()["newest"])
        epoch = node.agent.stats()["epoch"]
        node.kill()
        until(lambda: step()["off"])
        node.start(epoch)
        os.kill(node.process.pid, signal.SIGSTOP)
        saved = step()["saved"]
        until(lambda: step()["off"] and is_searching())
        begun_s = time.monotonic()
        assert step()["saved"] == saved
        assert time.monotonic() - begun_s < STEP_S
        os.kill(node.process.pid, signal.SIGCONT)
        until(lambda: step()["saved"] > saved)
        last = ck.stats["last_step"]
        until(lambda: (node.agent.stats()["newest"] or [0, 0])[1] == last)
    assert "there is a keeper again" in caplog.text

    node.agent.begin_generation(1, 1, None)
    monkeypatch.setenv("GPUOPS_GENERATION", "1")
    with Checkpointer(model=model, every=1) as ck:
        assert ck.restore() == last
        assert model.weight.item() == last


def test_a_keeper_that_dies_before_it_has_told_is_waited_for(node):
    node.start()
    ck = Checkpointer(model=nn.Linear(1, 1), every=1)
    ck._ensure_started()
    node.kill()
    starting = threading.Thread(target=node.start)
    starting.start()
    assert ck.restore() == 0
    starting.join()
    steps = itertools.count(1)  # a step that was made while there was no keeper is not made again
    until(lambda: ck.step(next(steps)) or ck.stats["saved"])
    ck.close()


def test_without_an_agent_the_first_rank_starts_another(tmp_path, monkeypatch):
    place = str(tmp_path / "states")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    monkeypatch.delenv("GPUOPS_KEEPER", raising=False)
    numbers = iter(range(1, 10**6))
    with Checkpointer(model=nn.Linear(1, 1), every=1, directory=place) as ck:
        assert ck.restore() == 0
        until(lambda: ck.step(next(numbers)) or ck.stats["saved"])
        line = KeeperConnection(keeper_socket_path(standalone_folder(os.environ, place)))
        os.kill(line.pid, signal.SIGKILL)
        line.close()
        until(lambda: ck.step(next(numbers)) or ck.stats["off"])
        saved = ck.stats["saved"]
        until(lambda: ck.step(next(numbers)) or ck.stats["saved"] > saved)
        last = ck.stats["last_step"]
        assert standalone_folder(os.environ, place).exists()
    assert not standalone_folder(os.environ, place).exists()
    with Checkpointer(model=nn.Linear(1, 1), every=1, directory=place) as ck:
        assert ck.restore() == last
