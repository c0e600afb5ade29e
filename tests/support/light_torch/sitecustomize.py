"""Spare test processes torch's compiler, which the first optimizer imports: 821 modules, 1.4 CPU-s.

On the path of the processes that tests start (`conftest`). Whoever asks for more than optimizers do
gets the real ``torch._dynamo``; tests that set PYTHONPATH themselves have it from the start.
"""

import importlib
import importlib.machinery
import sys
import types

NAME = "torch._dynamo"


class _LightDynamo(types.ModuleType):
    """``torch._dynamo`` as far as optimizers need it."""

    # Where somebody imports a module below it, the import system wants a path to look for it.
    __path__ = ()

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


class _BelowIt:
    """Finds modules below the light one: imports the real one, and what it has of that name."""

    @staticmethod
    def find_spec(name, _path=None, _target=None):
        if not name.startswith(f"{NAME}.") or not isinstance(sys.modules.get(NAME), _LightDynamo):
            return None
        real = _real()
        if name in sys.modules:
            return importlib.machinery.ModuleSpec(name, _BelowIt)
        return importlib.machinery.PathFinder.find_spec(name, real.__path__)

    @staticmethod
    def create_module(spec):
        return sys.modules[spec.name]

    @staticmethod
    def exec_module(_module):
        return None


def _real():
    if isinstance(sys.modules.get(NAME), _LightDynamo):
        del sys.modules[NAME]
    return importlib.import_module(NAME)


sys.modules.setdefault(NAME, _LightDynamo(NAME))
sys.meta_path.insert(0, _BelowIt)
