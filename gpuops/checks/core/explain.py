"""What a check reads, its limits, and the failure classes it can report, for people.

The failure classes and the keys of the profile are read from the check's source code, where each
stands by name, and from the files of Xids and log rules: a list kept by hand would go stale.
"""

import ast
import importlib
import inspect
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from gpuops.checks.core.check import AnyCheck, ProbeContext
from gpuops.checks.core.profile import Expectation, Profile
from gpuops.checks.core.suite import PlannedCheck
from gpuops.checks.core.xid_catalogue import load_xids
from gpuops.config.resolve import read_toml
from gpuops.model import FailureClass
from gpuops.rules import LogSource, load_rules

_GPU_XID = "gpu_xid"
_EXPECTATIONS = frozenset(
    item.name
    for item in fields(Profile)
    if item.name not in {"name", "about", "match", "path", "inherits"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What a check does, as a suite runs it under a profile.

    ``origins``: where each parameter is from, by its key: a suite's file, a setting; one that is
    missing has the check's own default. ``expectations``: those of the profile, by key.
    """

    planned: PlannedCheck
    doc: str
    sources: tuple[str, ...]
    origins: Mapping[str, str]
    expectations: Mapping[str, Expectation[Any] | None]
    failure_classes: tuple[FailureClass, ...]


def explain(
    planned: PlannedCheck,
    suite: str,
    paths: Mapping[str, Path],
    profile: Profile,
    settings: Mapping[str, str],
    catalogued: AbstractSet[FailureClass] = frozenset(),
) -> Explanation:
    """Explain *planned*, a check of the suite called *suite* (one of *paths*).

    *settings*: the parameters that a flag or the configuration sets, with which of the two.
    *catalogued*: see `catalogued_for`.
    """
    check = planned.check
    names = frozenset(_names_used_by(check))
    return Explanation(
        planned=planned,
        doc=inspect.getdoc(_judge(check)) or "",
        sources=check.probe.sources,
        origins={**origins(check.name, suite, paths), **settings},
        expectations={name: getattr(profile, name) for name in sorted(names & _EXPECTATIONS)},
        failure_classes=tuple(
            item for item in FailureClass if item.name in names or item in catalogued
        ),
    )


def catalogued_for(check: str, machine: ProbeContext) -> frozenset[FailureClass]:
    """Return the failure classes of *check* in the Xids and log rules of *machine*'s folders.

    Raises:
        ConfigError: A file in them is malformed.
    """
    if check == _GPU_XID:
        kinds = load_xids(machine.xid_dirs).values()
        return frozenset(kind.failure_class for kind in kinds if kind.failure_class is not None)
    rules = load_rules(machine.rule_dirs)
    return frozenset(
        rule.failure_class
        for rule in rules
        if rule.source is LogSource.KERNEL and rule.check == check
    )


def origins(check: str, suite: str, paths: Mapping[str, Path]) -> Mapping[str, str]:
    """Return the file of each parameter of *check* by key, inherited ones included.

    `gpuops.checks.core.suite.load_suite` has rejected a circle of inheritance.
    """
    table: Mapping[str, Any] = read_toml(paths[suite])
    base = table.get("inherits")
    found = dict(origins(check, base, paths)) if base is not None else {}
    for entry in table.get("check", []):
        if entry.get("name") == check:
            found.update(dict.fromkeys(entry, str(paths[suite])))
    return found


def _judge(check: AnyCheck) -> Any:  # noqa: ANN401 a function, or a partial of one
    return check.judge.func if isinstance(check.judge, partial) else check.judge


def _names_used_by(check: AnyCheck) -> Iterator[str]:
    """Yield what `_names` finds in the module of *check* and in the functions that it imports."""
    module = inspect.getmodule(_judge(check))
    if module is None:
        return
    tree = ast.parse(inspect.getsource(module))
    yield from _names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gpuops.checks."):
            imported = {alias.name for alias in node.names}
            other = importlib.import_module(str(node.module))
            for function in ast.parse(inspect.getsource(other)).body:
                if isinstance(function, ast.FunctionDef) and function.name in imported:
                    yield from _names(function)


def _names(tree: ast.AST) -> Iterator[str]:
    """Yield ``NAME`` of each ``FailureClass.NAME`` and each ``…profile.NAME`` in *tree*."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).rpartition(".")[2]
            if owner in {"FailureClass", "profile"}:
                yield node.attr
