"""Installs the heartbeat when, and only when, the user's program imports ``torch.optim``.

A finder at the head of `sys.meta_path` waits for that one module, takes itself out, and lets the
usual finder load it. A program without torch never pays more than the finder's name comparison.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

MODULE = "torch.optim.optimizer"
Hook = Callable[[Any, object, object], None]


def install(hook: Hook) -> None:
    """Have *hook* called after each optimizer step of this process, once torch is imported."""
    loaded = sys.modules.get(MODULE)
    if loaded is not None:
        _register(loaded, hook)
    else:
        sys.meta_path.insert(0, _Waiter(hook))


def _register(module: ModuleType, hook: Hook) -> None:
    def guarded(optimizer: Any, args: object, kwargs: object) -> None:  # noqa: ANN401
        # torch.compile traces whatever a compiled step calls: it must find nothing to trace here.
        if is_compiling():
            return
        hook(optimizer, args, kwargs)

    def is_compiling() -> bool:
        compiler = sys.modules.get("torch.compiler")  # imported after torch.optim
        return compiler is not None and compiler.is_compiling()

    try:
        module.register_optimizer_step_post_hook(guarded)
    except Exception:  # noqa: BLE001 boundary: a torch without this hook trains without heartbeats
        return


class _Waiter(MetaPathFinder):
    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _register(module, self._hook)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
