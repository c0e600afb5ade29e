"""What a script does that it should not is told, once; nothing is lost, or silently wrong."""

import os

import pytest
import torch
from torch import nn

from gpuops.checkpoint.types import ArgumentError, CheckpointError
from gpuops.worker.checkpointer import Checkpointer


def checkpointer(node, **given):
    return Checkpointer(keeper=node.connect(), every=1, **given)


def test_a_restore_that_is_not_at_the_start_is_no_fresh_start(node):
    model = nn.Linear(1, 1)
    with checkpointer(node, model=model) as ck:
        assert (ck.restore(), ck.restore()) == (0, 0)
        ck.step(1)
        with pytest.raises(CheckpointError, match=r"restore\(\) after step\(1\)"):
            ck.restore()
        ck.step(2)
        assert ck.stats["saved"] == 2
    with pytest.raises(CheckpointError, match=r"restore\(\) after close\(\)"):
        ck.restore()


def test_a_number_of_steps_that_falls_is_said_once(node, warnings):
    model = nn.Linear(1, 1)
    with checkpointer(node, model=model) as ck:
        ck.restore()
        for n in (7, 7, 1, 2, 8, 3, 9):
            ck.step(n)
        assert (ck.stats["saved"], ck.stats["off"]) == (3, None)

    assert len(warnings()) == 1
    assert warnings()[0].startswith(
        "step(1) after step(7): the number of completed steps must grow"
    )


def test_a_name_that_comes_later_is_not_left_out_silently(node, warnings):
    extra = {"tokens": 0}
    with checkpointer(node, extra=extra) as ck:
        ck.restore()
        ck.step(1)
        assert warnings() == []
        extra["epoch"] = 1
        ck.step(2)
        ck.step(3)

    assert len(warnings()) == 1
    assert warnings()[0].startswith("extra.epoch came after the Checkpointer was made")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_was_forked_neither_saves_nor_takes_leave(node):
    model = nn.Linear(1, 1)
    ck = checkpointer(node, model=model, optimizer=torch.optim.SGD(model.parameters()))
    ck.restore()
    ck.step(1)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        ck.step(2)
        ck.close()
        os.write(writer, b"%d" % node.core.memory.buffer_table.last_committed.step)
        os._exit(len(node.core.group.connections))  # it has not left it, not even its copy of it
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert os.read(reader, 10) == b"1"
    os.close(reader)
    os.close(writer)
    ck.step(2)
    ck.close()

    assert node.core.memory.buffer_table.last_committed.step == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"persist_every": None}, "persist_every=None: seconds, or a time"),
        ({"persist_every": True}, "persist_every=True"),
        ({"persist_every": [1]}, r"persist_every=\[1\]"),
        ({"persist_every": float("nan")}, "persist_every is nan"),
        ({"slots": "2"}, "slots is '2': it must be a whole number"),
        ({"slots": 2.0}, r"slots is 2\.0"),
        ({"keep_last": None}, "keep_last is None"),
        ({"keep_every": 1.5}, r"keep_every is 1\.5"),
        ({"directory": "~nobody-here/x"}, "directory='~nobody-here/x'"),
    ],
)
def test_an_argument_of_another_type_is_an_error_that_names_it(node, given, message):
    with pytest.raises(ArgumentError, match=message):
        checkpointer(node, model=nn.Linear(1, 1), **given)


class FullyShardedDataParallel(nn.Module):
    """As torch's first one (FSDP1), and others' of that name."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))


class OwnFsdp(FullyShardedDataParallel):
    """A subclass, as of a framework's."""


def marked(name):
    """Return a module whose parameter has the mark *name* of a library that took it apart."""
    module = nn.Linear(1, 1, bias=False)
    setattr(module.weight, name, True)
    return nn.Sequential(module)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (FullyShardedDataParallel(), r"^the model is a FullyShardedDataParallel \(FSDP1\), which"),
        (nn.Sequential(OwnFsdp()), "^the model at 0 is a FullyShardedDataParallel"),
        (marked("_fsdp_flattened"), r"^the model's 0\.weight is sharded by a FullySharded"),
        (marked("ds_id"), r"^the model's 0\.weight is partitioned by DeepSpeed \(ZeRO 3\)"),
    ],
)
def test_a_model_in_pieces_without_a_place_is_refused_at_once(node, model, message):
    for given in ({"model": model}, {"model": {"a": [model]}}, {"ema": {"b": model}}):
        with pytest.raises(ArgumentError, match=message):
            checkpointer(node, **given)


def test_deepspeeds_optimizers_are_refused_at_once(node):
    kind = type("DeepSpeedZeroOptimizer", (), {"__module__": "deepspeed.runtime.zero"})
    for method in ("state_dict", "load_state_dict"):
        setattr(kind, method, dict)

    with pytest.raises(ArgumentError, match="optimizer is DeepSpeed's, whose state is not saved"):
        checkpointer(node, model=nn.Linear(1, 1), optimizer=kind())


def test_a_second_checkpointer_does_not_load_what_the_first_saved(tmp_path, monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))  # of two nodes without agents: they only load

    def made(name):
        return Checkpointer(model=nn.Linear(1, 1), directory=tmp_path / name)

    first, second, other, third = (made(name) for name in ("a", "a", "b", "a"))
    assert (first.restore(), other.restore()) == (0, 0)
    with pytest.raises(CheckpointError, match="has a Checkpointer already"):
        second.restore()
    first.close()
    assert third.restore() == 0
    other.close()
    third.close()
