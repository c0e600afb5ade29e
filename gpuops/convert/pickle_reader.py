"""Read a pickle as data: nothing that it names is imported, called or built.

A pickle is a program for a small stack machine. This one runs the instructions that make plain
values; where the program would look up a class or call one, it records that. The caller lists the
names that are allowed; any other one is refused before the next instruction.
"""

# ruff: noqa: ANN401 a pickle has values of any type

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pickletools import genops
from typing import Any

from gpuops.checkpoint.types import CheckpointError, CorruptError


class RefusedPickleError(CheckpointError):
    """The pickle names something that its kind of file does not need."""


@dataclass(frozen=True, slots=True)
class PickleGlobal:
    """A class, function or constant that the pickle names; it was not imported."""

    name: str


@dataclass(slots=True, eq=False)
class PickleCall:
    """The result of calling *kind*; it was not called."""

    kind: str
    args: tuple[Any, ...]
    state: Any = None


@dataclass(slots=True, eq=False)
class PickleDict:
    """A dict of the pickle. Its keys are not hashed: nested tuples would take for ever."""

    items: list[tuple[Any, Any]] = field(default_factory=list)

    def by_name(self) -> dict[str, Any]:
        """Return the items with text keys; the last of equal ones counts, as in a dict."""
        return {key: value for key, value in self.items if isinstance(key, str)}


class _Mark:
    """The start of a sequence of items."""


_MARK = _Mark()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = {
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "LONG4",
    "BINFLOAT",
    "SHORT_BINUNICODE",
    "BINUNICODE",
    "BINUNICODE8",
    "SHORT_BINBYTES",
    "BINBYTES",
    "BINBYTES8",
}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _PickleMachine:
    def __init__(self, is_allowed: Callable[[str], bool]) -> None:
        self.stack: list[Any] = []
        self._memo: list[Any] = []
        self._is_allowed = is_allowed
        self._handlers: dict[str, Callable[[Any], None]] = {
            "EMPTY_DICT": lambda _: self.stack.append(PickleDict()),
            "EMPTY_LIST": lambda _: self.stack.append([]),
            "MARK": lambda _: self.stack.append(_MARK),
            "MEMOIZE": lambda _: self._memo_put(len(self._memo)),
            "BINPUT": self._memo_put,
            "LONG_BINPUT": self._memo_put,
            "BINGET": self._memo_get,
            "LONG_BINGET": self._memo_get,
            "TUPLE": lambda _: self.stack.append(tuple(self._pop_mark())),
            "APPEND": lambda _: self._append([self.stack.pop()]),
            "APPENDS": lambda _: self._append(self._pop_mark()),
            "SETITEM": lambda _: self._set([self.stack.pop() for _ in "kv"][::-1]),
            "SETITEMS": lambda _: self._set(self._pop_mark()),
            "GLOBAL": lambda arg: self._name(*str(arg).split(" ", 1)),
            "STACK_GLOBAL": lambda _: self._name(*[self.stack.pop() for _ in "mn"][::-1]),
            "NEWOBJ": lambda _: self._call(),
            "REDUCE": lambda _: self._call(),
            "BUILD": lambda _: self._build(),
        }

    def run(self, opcode: str, arg: Any) -> None:
        if opcode in _VALUES:
            self.stack.append(arg)
        elif opcode in _CONSTANTS:
            self.stack.append(_CONSTANTS[opcode])
        elif opcode in _TUPLES:
            n_items = _TUPLES[opcode]
            items = tuple(self.stack[len(self.stack) - n_items :])
            if len(items) != n_items:
                raise IndexError("a tuple larger than the stack")
            del self.stack[len(self.stack) - n_items :]
            self.stack.append(items)
        elif opcode in self._handlers:
            self._handlers[opcode](arg)
        else:
            raise RefusedPickleError(f"it has the instruction {opcode}, which is not admitted")

    def _memo_put(self, index: int) -> None:
        if index == len(self._memo):
            self._memo.append(self.stack[-1])
        elif 0 <= index < len(self._memo):
            self._memo[index] = self.stack[-1]
        else:
            raise IndexError("a memo index out of order")

    def _memo_get(self, index: int) -> None:
        self.stack.append(self._memo[index])

    def _pop_mark(self) -> list[Any]:
        items = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def _append(self, items: Sequence[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise TypeError("items for a value that is not a list")
        target.extend(items)

    def _set(self, items: Sequence[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, PickleCall) and target.kind == "collections.OrderedDict":
            target.state = target.state or PickleDict()
            target = target.state
        if not isinstance(target, PickleDict) or len(items) % 2:
            raise TypeError("items for a value that is not a dict")
        target.items.extend(zip(items[::2], items[1::2], strict=True))

    def _name(self, module: object, name: object) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a name that is not text")
        full = f"{module}.{name}"
        if not self._is_allowed(full):
            raise RefusedPickleError(f"it names {full[:200]!r}, which is not admitted")
        self.stack.append(PickleGlobal(full))

    def _call(self) -> None:
        args, kind = self.stack.pop(), self.stack.pop()
        if not isinstance(kind, PickleGlobal) or not isinstance(args, tuple):
            raise TypeError("a call of a value that is not a class")
        self.stack.append(PickleCall(kind.name, args))

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, PickleCall) or target.state is not None:
            raise TypeError("a state for a value that has none")
        target.state = state


def read_pickle(
    data: bytes,
    allowed_names: Collection[str],
    *,
    is_allowed: Callable[[str], bool] = lambda _name: False,
) -> Any:
    """Return the value in *data*: plain ones, `PickleDict`, `PickleCall` and `PickleGlobal`.

    Args:
        data: One pickle of protocol 2 to 5.
        allowed_names: The full names that it may have.
        is_allowed: Admits a name that is not among them.

    Raises:
        RefusedPickleError: It names something else, or has an instruction that such files do not
            need.
        CorruptError: It is not a pickle, or truncated.
    """
    machine = _PickleMachine(lambda name: name in allowed_names or is_allowed(name))
    try:
        for opcode, arg, _ in genops(data):
            if opcode.name == "STOP":
                (value,) = machine.stack
                return value
            if opcode.name not in {"PROTO", "FRAME"}:
                machine.run(opcode.name, arg)
    except (ValueError, IndexError, TypeError, AttributeError, UnicodeError, MemoryError) as exc:
        raise CorruptError(f"it is not a complete pickle: {type(exc).__name__}: {exc}") from exc
    raise CorruptError("it is not a complete pickle: it has no end")
