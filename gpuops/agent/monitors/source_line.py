"""What a line of a program that stands in native code waits for, told from its syntax; pure."""

import ast
import builtins
import io
import re
import tokenize
from collections.abc import Iterator
from enum import StrEnum

_COLLECTIVES = re.compile(
    r"wait|barrier|synchronize|all_reduce|(?:all_gather|reduce_scatter|all_to_all|broadcast)\w*"
)
# A socket has these methods, too; what it waits for is no rank.
_MESSAGES = frozenset({"recv", "irecv", "send"})
_GROUPS = frozenset({"dist", "comm", "group", "pg"})
# What copies a value from the device: `_local_scalar_dense` (torch's `item` and every conversion to
# a Python number or truth value), a copy to the host, an operator whose result's size is data.
_READS = frozenset({
    *("item", "cpu", "tolist", "numpy", "nonzero", "argwhere", "is_nonzero", "equal", "allclose"),
    *("masked_select", "unique", "_unique2", "unique_consecutive", "bincount"),
})  # fmt: skip
_NUMBERS = frozenset({"float", "int", "bool"})
_TRUTHS = frozenset({"any", "all", "isnan", "isinf", "isfinite"})
# Calls that take no time, but for the value that they are given.
_QUICK = frozenset(vars(builtins)) | {"math", "torch", "np"}


_BLANK = frozenset({tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT})


class Awaited(StrEnum):
    """What a line waits for, if it is native code that waits there."""

    RANKS = "ranks"
    DEVICE = "device"
    NOTHING = "nothing"


def statement_at(text: str, line: int) -> str | None:
    """Return all lines of the statement of the source *text* that has this *line*.

    Of a compound statement its first line, with what continues it; None where there is none.
    """
    lines, begin = text.splitlines(), 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            begin = begin or (0 if token.type in _BLANK else token.start[0])
            if token.type == tokenize.NEWLINE:
                if token.end[0] >= line:
                    return "\n".join(lines[begin - 1 : token.end[0]]) if begin <= line else None
                begin = 0
    except (tokenize.TokenError, SyntaxError):
        pass  # of a newer Python, or changed since: the line alone
    return lines[line - 1] if 0 < line <= len(lines) else None


def awaited_in(line: str) -> tuple[Awaited, bool]:
    """Return what a whole statement (of a compound one the first line) waits for.

    And whether that is certain: no other call in it may be the one that takes so long.
    """
    tree = _parsed(line)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if any(_waits_for_ranks(call) for call in calls):
        return Awaited.RANKS, False
    reads = {call for call in calls if _reads(call)} | _truths(tree)
    inside = {node for call in calls if _computes(call, tree) for node in _arguments(call)}
    if not reads - inside:
        return Awaited.NOTHING, False
    return Awaited.DEVICE, all(call in reads or _root(call) in _QUICK for call in calls)


def _parsed(line: str) -> ast.Module:
    text = re.sub(r"^elif\b", "if", line.strip())
    for ending in ("", "\n pass"):
        try:
            return ast.parse(text + ending)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return ast.Module([], [])


def _waits_for_ranks(call: ast.Call) -> bool:
    of = _name(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    name = _name(call.func)
    if name in _MESSAGES:
        return of in _GROUPS
    return bool(_COLLECTIVES.fullmatch(name)) and (bool(of) or name != "wait")


def _reads(call: ast.Call) -> bool:
    name, given = _name(call.func), call.args[:1]
    if isinstance(call.func, ast.Name):
        # Of what calls nothing; the call would take the time.
        return name in _NUMBERS and not any(isinstance(n, ast.Call) for n in _arguments(call))
    target = str(getattr(given[0], "value", "")) if name == "to" and given else ""
    return name in _READS or target.startswith("cpu")


def _truths(tree: ast.Module) -> set[ast.AST]:
    """Return the tensors whose truth value a condition asks for."""
    tests = [node.test for node in tree.body if isinstance(node, ast.If | ast.Assert)]
    found: set[ast.AST] = set()
    for test in tests:
        calls = {node for node in ast.walk(test) if isinstance(node, ast.Call)}
        # A condition that calls nothing takes no time, unless it is a tensor's.
        found |= {call for call in calls if _name(call.func) in _TRUTHS} if calls else {test}
    return found


def _computes(call: ast.Call, tree: ast.Module) -> bool:
    """Return whether *call* gives a value and may take long; else it prints or keeps one."""
    is_statement = any(isinstance(each, ast.Expr) and each.value is call for each in tree.body)
    return not is_statement and _root(call) not in _QUICK


def _arguments(call: ast.Call) -> Iterator[ast.AST]:
    for each in (*call.args, *call.keywords):
        yield from ast.walk(each)


def _name(node: ast.expr) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def _root(call: ast.Call) -> str:
    node: ast.AST = call.func
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return getattr(node, "id", "")
