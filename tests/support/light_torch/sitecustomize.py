"""Spare test processes torch's compiler, 821 modules: optimizers and DDP import it, 1.3 CPU-s.

On the path of the processes that tests start (`conftest`). Whoever asks for more than optimizers do
gets the real ``torch._dynamo``; tests that set PYTHONPATH themselves have it from the start.

It also makes the garbage collector rare and has it skip what was imported: at its end a process
with torch would search a million objects twice, and another 0.3 CPU-s are gone.

And a process ends only once gloo's threads are idle. One that still drops the tensors of the last
collective asks for Python's lock; while Python is being torn down that aborts the process (torch
2.13: "terminate called without an active exception"), once in some runs of all tests.
"""

import atexit
import gc
import importlib
import importlib.machinery
import sys
import threading
import types
from pathlib import Path

NAME = "torch._dynamo"


class _LightUtils:
    """``torch._dynamo.utils`` as far as DistributedDataParallel's constructor needs it."""

    @staticmethod
    def get_optimize_ddp_mode():
        return "ddp_optimizer"  # of a process that has not set torch._dynamo.config.optimize_ddp

    def __getattr__(self, name):
        return getattr(_real().utils, name)


class _LightDynamo(types.ModuleType):
    """``torch._dynamo`` as far as optimizers and DistributedDataParallel need it."""

    # Where somebody imports a module below it, the import system wants a path to look for it.
    __path__ = ()
    utils = _LightUtils()

    @staticmethod
    def disable(fn=None, recursive=True, **_options):
        return fn if fn is not None else lambda function: function

    @staticmethod
    def graph_break(*_words):
        return None

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real(), name)


class _Finder:
    """Finds the light module first, and the real one for whoever asks for what is below it."""

    is_real = False

    @classmethod
    def find_spec(cls, name, _path=None, _target=None):
        if name == NAME and not cls.is_real:
            return importlib.machinery.ModuleSpec(name, cls, is_package=True)
        if not name.startswith(f"{NAME}.") or not isinstance(sys.modules.get(NAME), _LightDynamo):
            return None
        real = _real()
        if name in sys.modules:
            return importlib.machinery.ModuleSpec(name, cls)
        return importlib.machinery.PathFinder.find_spec(name, real.__path__)

    @staticmethod
    def create_module(spec):
        return _LightDynamo(NAME) if spec.name == NAME else sys.modules[spec.name]

    @staticmethod
    def exec_module(_module):
        return None


def _real():
    _Finder.is_real = True
    if isinstance(sys.modules.get(NAME), _LightDynamo):
        del sys.modules[NAME]
    return importlib.import_module(NAME)


def _gloo_states():
    """Return the state of each of gloo's threads, a letter."""
    for stat in Path("/proc/self/task").glob("*/stat"):
        try:
            _, _, rest = stat.read_text().partition("(")
        except OSError:  # it has ended
            continue
        name, _, fields = rest.rpartition(")")
        if name == "pt_gloo_runloop":
            yield fields.split()[0]


def _wait_for_gloo():
    if "torch.distributed" not in sys.modules:
        return
    pause = threading.Event()
    for _ in range(200):
        states = list(_gloo_states())
        if not states:
            return
        pause.wait(0.01)  # without Python's lock, for which one may wait
        if "R" not in states:
            return


sys.meta_path.insert(0, _Finder)
if __name__ == "sitecustomize":  # pytest's own processes import it from its package
    gc.set_threshold(50_000, 20, 50)
    atexit.register(gc.freeze)
    atexit.register(_wait_for_gloo)
