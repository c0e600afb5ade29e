"""Installs the heartbeat when, and only when, the user's program imports ``torch.optim``.

A finder at the head of `sys.meta_path` waits for one module, removes itself, and lets the usual
finder load it: ``torch.optim`` for the steps, ``torch.utils.data`` for the time in its loader. A
program without torch never pays more than the finders' name comparisons.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from threading import local
from types import FrameType, ModuleType
from typing import Any
from weakref import ref

from gpuops.wire.ring import STEP_UNKNOWN

# Reads without progress until all parameters are scanned again: first, and at most.
# A scan takes microseconds for each parameter; its interval doubles while it finds nothing.
PATIENCE = 16
PATIENCE_MAX = 1024


class StepReader:
    """Reads one optimizer's step from the state of one of its parameters, or from a group of them.

    Of the parameters that have a step the first with the highest one is chosen, because a parameter
    without gradients does not advance. One that stops advancing later (a frozen layer) is replaced
    by the highest at that time. Some optimizers count in their parameter groups instead (see
    `_group_counter`). ``calls`` is how often the optimizer has stepped in this process.
    """

    __slots__ = (
        "_accepted",
        "_chosen",
        "_group",
        "_highest",
        "_parameter",
        "_patience",
        "_stalled",
        "calls",
    )

    def __init__(self) -> None:
        self.calls = 0
        self._group: tuple[int, str] | None = None
        self._parameter: Callable[[], Any] = _nothing
        self._accepted: Any = None
        self._chosen = False
        self._highest = STEP_UNKNOWN
        self._stalled = 0
        self._patience = PATIENCE

    def read(self, optimizer: Any) -> int:  # noqa: ANN401 torch is not imported here
        """Return the optimizer's step, `STEP_UNKNOWN` where it has none on the host."""
        self.calls += 1
        if not self._chosen:
            self._choose(optimizer)
        step = self._scan(optimizer)
        if step > self._highest:
            self._highest = step
            return step
        self._stalled += 1
        if self._stalled < self._patience:
            return step
        self._stalled = 0
        self._choose(optimizer)
        step = self._scan(optimizer)
        moved = step > self._highest
        self._patience = PATIENCE if moved else min(2 * self._patience, PATIENCE_MAX)
        self._highest = max(step, self._highest)
        return step

    def _scan(self, optimizer: Any) -> int:  # noqa: ANN401
        if self._group is not None:
            index, key = self._group
            groups = optimizer.param_groups
            return _as_int(groups[index].get(key)) if index < len(groups) else STEP_UNKNOWN
        parameter = self._parameter()
        if parameter is None:
            return STEP_UNKNOWN
        state = optimizer.state.get(parameter)
        step = None if state is None else state.get("step")
        if step is self._accepted and step is not None:
            return int(step)
        number = _as_int(step)
        self._accepted = step if number != STEP_UNKNOWN else None
        return number

    def _choose(self, optimizer: Any) -> None:  # noqa: ANN401
        highest, chosen = STEP_UNKNOWN, None
        for parameter, state in optimizer.state.items():
            self._chosen = True
            step = _as_int(state.get("step")) if isinstance(state, Mapping) else STEP_UNKNOWN
            if step > highest:
                highest, chosen = step, parameter
        self._group = None
        if self._chosen:
            for index, group in enumerate(getattr(optimizer, "param_groups", ())):
                key = _group_counter(group)
                if key and (step := _as_int(group[key])) > highest:
                    highest, self._group = step, (index, key)
        self._parameter = _nothing if chosen is None else _weak(chosen)
        self._accepted = None


def _group_counter(group: Mapping[str, Any]) -> str:
    """Return the key under which *group* counts its optimizer's steps, "" where it does not.

    ``step``: FusedAdam and others of apex, Transformer Engine and DeepSpeed. ``k``: schedule-free
    optimizers (they have ``weight_sum``), Prodigy and D-Adaptation (they have ``d``); elsewhere it
    is a constant, as in Lookahead.
    """
    if "step" in group:
        return "step"
    return "k" if "k" in group and ("weight_sum" in group or "d" in group) else ""


def _nothing() -> None:
    return None


def _weak(parameter: Any) -> Callable[[], Any]:  # noqa: ANN401
    try:
        return ref(parameter)
    except TypeError:
        return lambda: (
            parameter
        )  # a name or a number, as some optimizers use: it needs little memory


def _as_int(step: object) -> int:
    if isinstance(step, int | float):
        return int(step)
    device = getattr(step, "device", None)
    if step is None or device is None or device.type != "cpu":
        return STEP_UNKNOWN
    return int(step.item())  # type: ignore[attr-defined]  # a zero-dimensional CPU tensor


_STATE_DICT_MODULE = "torch.distributed.checkpoint.state_dict"
_FRAMES_MAX = 16  # wrappers of ``step()``: torch's own, a scheduler's, a container's


def only_makes_state(optimizer: Any) -> bool:  # noqa: ANN401
    """Return whether the step whose hook calls this only creates the optimizer's state.

    Before they save or load, the functions of `torch.distributed.checkpoint.state_dict` make one
    step with gradients and a learning rate of 0 (``_init_optim_state``). A warm-up may begin with
    0 as well, so that the caller decides.
    """
    if not _has_zero_lr(optimizer):
        return False
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 the only way to a caller
    for _ in range(_FRAMES_MAX):
        if frame is None:
            return False
        is_theirs = frame.f_globals.get("__name__") == _STATE_DICT_MODULE
        if is_theirs and frame.f_code.co_name == "_init_optim_state":
            return True
        frame = frame.f_back
    return False


def _has_zero_lr(optimizer: Any) -> bool:  # noqa: ANN401
    groups = getattr(optimizer, "param_groups", None)
    rate: Any = groups[0].get("lr", 0.0) if groups else None
    if isinstance(rate, int | float):
        return rate == 0
    device = getattr(rate, "device", None)
    is_on_host = device is not None and device.type == "cpu"
    return is_on_host and bool(rate.item() == 0)


MODULE = "torch.optim.optimizer"
LOADER_MODULE = "torch.utils.data.dataloader"
Hook = Callable[[Any, object, object], None]


class LoaderTime(local):
    """The time of each thread in torch's data loader; of nested loaders, the outermost's."""

    ns = 0
    is_inside = False


def install(
    hook: Hook, before: Hook, loader: LoaderTime, on_hidden: Callable[[], None] = lambda: None
) -> None:
    """Have *hook* called after, and *before* before each optimizer step of this process.

    *loader* takes the time in torch's data loader. *on_hidden* is called when a step is compiled so
    that the hook cannot be called from it.
    """
    when_imported(MODULE, lambda module: _register(module, hook, before, on_hidden))
    when_imported(LOADER_MODULE, lambda module: _time_loader(module, loader))


def when_imported(name: str, call: Callable[[ModuleType], None]) -> None:
    """Have *call* called with the module *name* once it is imported; what it raises is dropped."""

    def guarded(module: ModuleType) -> None:
        try:
            call(module)
        except Exception:  # noqa: BLE001 boundary: with another torch one trains without us
            return

    loaded = sys.modules.get(name)
    if loaded is not None:
        guarded(loaded)
    else:
        sys.meta_path.insert(0, _Waiter(name, guarded))


def _register(module: ModuleType, hook: Hook, before: Hook, on_hidden: Callable[[], None]) -> None:
    def uncompiled(optimizer: Any, args: object, kwargs: object) -> None:  # noqa: ANN401
        if not _is_compiling():
            before(optimizer, args, kwargs)

    module.register_optimizer_step_post_hook(_for_compiled_too(hook, on_hidden))
    module.register_optimizer_step_pre_hook(uncompiled)


def _time_loader(
    module: ModuleType, spent: LoaderTime, mono_ns: Callable[[], int] = time.monotonic_ns
) -> None:
    iterator = module._BaseDataLoaderIter  # noqa: SLF001 where all of torch's loaders return
    fetch = iterator.__next__

    @wraps(fetch)
    def timed(batches: Any) -> Any:  # noqa: ANN401
        if _is_compiling() or spent.is_inside:
            return fetch(batches)
        begun_ns = mono_ns()
        try:
            spent.is_inside = True
            return fetch(batches)
        finally:
            spent.is_inside = False
            spent.ns += mono_ns() - begun_ns

    iterator.__next__ = timed


def _for_compiled_too(hook: Hook, on_hidden: Callable[[], None]) -> Hook:
    outside: list[Hook] = []  # the hook for compiled steps, once one may call it
    was_hidden = False

    def guarded(optimizer: Any, args: object, kwargs: object) -> None:  # noqa: ANN401
        if not _is_compiling():
            hook(optimizer, args, kwargs)
            return
        # torch.compile traces these lines, not the hook. The call breaks the graph, as torch's own
        # `step` does before and after its computation. ``comptime`` calls while it traces.
        tracing = sys.modules.get("torch._dynamo.comptime")
        if tracing is None:
            return
        tracing.comptime(when_compiled)
        for call in outside:
            call(optimizer, args, kwargs)

    def when_compiled(context: object) -> None:
        nonlocal was_hidden
        try:
            if _forbids_breaks(context):
                outside.clear()
                if not was_hidden:
                    on_hidden()
                was_hidden = True
            elif not outside:
                outside.append(sys.modules["torch._dynamo"].disable(hook))
        except Exception:  # noqa: BLE001 boundary: a compiled step without heartbeats still trains
            return

    return guarded


def _is_compiling() -> bool:
    compiler = sys.modules.get("torch.compiler")  # imported after torch.optim
    return compiler is not None and compiler.is_compiling()


def _forbids_breaks(context: object) -> bool:
    """Return whether a graph break is an error (``fullgraph=True``) in what is being traced.

    *context* is a ``torch._dynamo.comptime.ComptimeContext``. Where this torch does not say, it is.
    """
    tracer: Any = getattr(context, "_ComptimeContext__tx", None)
    if not hasattr(tracer, "one_graph"):
        return True
    while tracer is not None:
        if tracer.one_graph or getattr(tracer, "error_on_graph_break", False):
            return True
        tracer = getattr(tracer, "parent", None)
    return False


class _Waiter(MetaPathFinder):
    def __init__(self, name: str, call: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._call = call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._call(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
