"""Spare test processes torch's compiler, 821 modules: optimizers and DDP import it, 1.3 CPU-s.

On the path of the processes that tests start (`conftest`). Whoever asks for more than optimizers do
gets the real ``torch._dynamo``; tests that set PYTHONPATH themselves have it from the start.

It also makes the garbage collector rare and has it skip what was imported: at its end a process
with torch would search a million objects twice, and another 0.3 CPU-s are gone.
"""

import atexit
import gc
import importlib
import importlib.machinery
import sys
import types

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


sys.meta_path.insert(0, _Finder)
if __name__ == "sitecustomize":  # pytest's own processes import it from its package
    gc.set_threshold(50_000, 20, 50)
    atexit.register(gc.freeze)
