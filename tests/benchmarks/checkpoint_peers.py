"""Other people's checkpointers as `Saver`s of the benchmark, where they install and run on a CPU.

They lie in ``.venv-peers``, without torch: that of this environment is used for all. What cannot
run is named with the reason.
"""

import contextlib
import logging
import shutil
import sys
import time
from pathlib import Path

from checkpoint_torch import SaverFactory, state_dict_of

from gpuops.worker.bench.savers import BenchError

PEERS = Path(__file__).parents[2] / ".venv-peers"
PACKAGES = ("dlrover==0.6.1", "torch_checkpointing==0.1.1", "nvidia-resiliency-ext==0.4.1")
TRIAL_S = 30.0


def others(subject, folder):
    """Return the ways to save that are installed, and {name: why not} of the rest."""
    site = next(PEERS.glob("lib/python3.*/site-packages"), None)
    if site is None:
        return [], dict.fromkeys(PACKAGES, f"not installed in {PEERS.name}")
    if str(site) not in sys.path:
        sys.path.append(str(site))
    return [
        SaverFactory(make.name, lambda m=make: tried(m, subject, folder)) for make in PEER_WAYS
    ], {}


def tried(make, subject, folder):
    """Return a saver that has saved once; what it began ends where it cannot."""
    with contextlib.ExitStack() as undo:
        saver = make(subject, folder)
        undo.callback(saver.close)
        trial(saver)
        undo.pop_all()
    return saver


def trial(saver):
    """Save once and wait."""
    saver.save(1)
    end_s = time.monotonic() + TRIAL_S
    while not saver.is_done():
        if time.monotonic() > end_s:
            raise BenchError(f"nothing durable within {TRIAL_S:g} s")
        time.sleep(0.01)
    saver.clean()


class Flash:
    """DLRover's flash checkpoint, without its launcher: shared memory, and a process that writes.

    That process ends with the trainer; with ``dlrover-run`` it would be the agent's, and the copy
    in shared memory would outlive a SIGKILL of the trainer, unless it is being overwritten then.
    """

    name = "DLRover 0.6.1, flash checkpoint"

    def __init__(self, subject, folder):
        from dlrover.python.common.constants import CheckpointConstant
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

        logging.getLogger("dlrover").setLevel(logging.ERROR)
        self._subject, self._folder = subject, folder / "dlrover"
        self._folder.mkdir()
        self._tracker = self._folder / CheckpointConstant.TRACER_FILE_NAME
        self._disk = StorageType.DISK
        self._checkpointer = DdpCheckpointer(str(self._folder))
        self._offset, self._step = 0, 0

    def save(self, step):
        # The trial was step 1 already, and a step is saved once.
        self._step = step + self._offset
        self._offset = 1
        path = self._folder / f"step-{self._step}" / "rank_0.pt"
        self._checkpointer.save_checkpoint(
            self._step, state_dict_of(self._subject), str(path), storage_type=self._disk
        )
        if self._checkpointer._engine.latest_step != self._step:
            raise BenchError("it skipped the save: the one before is still being written")

    def is_done(self):
        with contextlib.suppress(OSError, ValueError):
            return int(self._tracker.read_text()) == self._step
        return False

    def recoverable_s(self, stall_s, _durable_s):
        return stall_s

    def clean(self):
        for path in self._folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)

    def close(self):
        engine = self._checkpointer._engine
        if engine.saver_proc is not None:
            engine.saver_proc.terminate()
            engine.saver_proc.join(10)
        with contextlib.suppress(Exception):
            engine._shm_handler.shared_memory.unlink()


class TorchCheckpointing:
    """torch_checkpointing: staged into shared memory, written by a process; kept stager."""

    name = "torch_checkpointing 0.1.1"

    def __init__(self, subject, folder):
        from torch_checkpointing import CheckpointBase, CheckpointItem, make_async_checkpoint_saver
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        class State(CheckpointBase):
            def __init__(self, state):
                self._state = state

            def get_items(self):
                return {key: CheckpointItem(value=value) for key, value in self._state.items()}

            def load_state_dict(self, state_dict):
                raise NotImplementedError

        self._make, self._subject = State, subject
        self._folder = folder / "torch_checkpointing"
        self._folder.mkdir()
        # Direct I/O, the default, ends in EINVAL where the last write is not a whole block.
        self._saver = make_async_checkpoint_saver(
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False)
        )
        self._written, self._n = None, 0

    def save(self, _step):
        self._n += 1
        path = str(self._folder / f"step-{self._n}")
        staged, self._written = self._saver.save(path, self._make(state_dict_of(self._subject)))
        # Until then the optimizer must not step.
        staged.result()

    def is_done(self):
        if not self._written.done():
            return False
        self._written.result()
        return True

    def recoverable_s(self, _stall_s, durable_s):
        return durable_s

    def clean(self):
        for path in self._folder.iterdir():
            shutil.rmtree(path)

    def close(self):
        self._saver.close()


class Nvrx:
    """nvidia-resiliency-ext's asynchronous torch.save."""

    name = "nvidia-resiliency-ext 0.4.1"

    def __init__(self, subject, folder):
        from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

        self._subject, self._path = subject, folder / "nvrx.pt"
        self._saver = TorchAsyncCheckpoint()

    def save(self, _step):
        self._saver.async_save(state_dict_of(self._subject), str(self._path))

    def is_done(self):
        self._saver.finalize_async_save()
        return self._path.exists()

    def recoverable_s(self, _stall_s, durable_s):
        return durable_s

    def clean(self):
        self._path.unlink(missing_ok=True)

    def close(self):
        with contextlib.suppress(Exception):
            self._saver.close()


PEER_WAYS = (Nvrx, Flash, TorchCheckpointing)
