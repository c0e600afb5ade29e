"""Everything that users of gpuops rely on, written down: ``python -m support.public_interface``.

What it prints, or writes to the file that is named, is the same on every machine and names nothing
internal: a change of the code that changes a line of it has changed a promise. ``make interface``
writes the file that ``tests/unit/test_public_interface.py`` compares with.
"""

import ast
import inspect
import json
import os
import re
import sys
import tomllib
from pathlib import Path

import torch

import gpuops
from gpuops import Checkpointer, errors, phase, progress, should_stop
from gpuops.agent.monitors.plugin_process import GROUP
from gpuops.checkpoint.storage.directory_files import LeftoverKind
from gpuops.checkpoint.types import BadRequestError, CheckpointError, CorruptError, Tier
from gpuops.checks.core.xid_catalogue import SxidClass, XidClass
from gpuops.cli.main import EXIT_CLOSED_PIPE, EXIT_INTERRUPTED
from gpuops.config.resolve import SETTINGS, GateMode
from gpuops.incident.decision import OnExhausted, ReportKind, RunAction
from gpuops.incident.runbook import SECTIONS, SEVERITIES
from gpuops.model import (
    ActionKind,
    Confidence,
    EntityKind,
    FailureClass,
    IncidentState,
    Role,
    Severity,
    Side,
    Status,
    UnknownReason,
)
from gpuops.rules import LogSource
from gpuops.worker.adapters.dcp import GpuopsReader, GpuopsStager, GpuopsWriter
from support.public_commands import commands, outputs, run_flags
from support.public_data import accepted_keys, facts, shipped
from support.public_events import events, records
from support.public_formats import checkpoints, control, node_files, plugins, ring
from support.public_run import one_run
from support.public_shape import shape
from support.public_store import spool_line, tables

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "fixtures" / "public_interface.json"
VARIABLE = re.compile(r"GPUOPS_[A-Z0-9_]*[A-Z0-9]")
SCHEMA = re.compile(r"gpuops\.[a-z-]+/\d*")
# What events and the rules of decisions are called: nouns that begin such a word in the sources.
WORD = re.compile(
    r"(agent|attempt|board|budget|burnin|check|checkpoint|decision|drain|drill|gate|incident|launch"
    r"|node|nodes|restart|run|software|sweep|tool|worker)\.[a-z_]+"
)
NO_WORD = re.compile(r".*\.(json|lock|log|sock|sh|id|txt|jsonl)")
# What a keeper tells of its states, and a run records as ``checkpoint.…``.
KEEPER_TELLS = (
    *("committed", "skipped", "given_up", "whole", "replicated", "restored", "persisted"),
    *("corrupt", "persist_failed", "commit_failed", "epoch_behind", "passed_over"),
    *("replica_failed", "fetch_failed", "cannot_offer", "events_lost"),
    *("replicas_differ", "replicas_alike", "replicas_apart"),
)
ENUMS = {
    "unknown reason": UnknownReason,
    "entity": EntityKind,
    "side": Side,
    "confidence": Confidence,
    "role of evidence": Role,
    "action": ActionKind,
    "state of an incident": IncidentState,
    "severity of an event": Severity,
    "failure class": FailureClass,
    "report": ReportKind,
    "verdict on a run": RunAction,
    "on exhausted": OnExhausted,
    "mode of the gate": GateMode,
    "tier": Tier,
    "leftover of checkpoints": LeftoverKind,
    "source of a rule": LogSource,
    "class of an xid": XidClass,
    "class of an sxid": SxidClass,
}
# What people write in a configuration, of each kind that some setting takes.
PROBES = (
    *("0", "1", "3", "on", "off", "true", "auto", "never", "shrink", "observe", "16,17", "10/6h"),
    *("90s", "2h", "256MiB", "127.0.0.1:8000", "/abs", "a/b", "policy:decide", "s3://bucket/a"),
    *("free text", True, 5, 2.5, [16, 17]),
)


def dump():
    """Return everything, as one JSON object."""
    return {
        "exit codes": exit_codes(),
        "values": {word: sorted(item.value for item in kind) for word, kind in ENUMS.items()},
        "statuses": {item.word: item.value for item in Status},
        "settings": settings(),
        "sources": words_of_sources(),
        "python": python_names(),
        "packaging": packaging(),
        "commands": commands(),
        "flags of gpuops run": run_flags(),
        "json": outputs(),
        "records": records(),
        "events": events(),
        "a run": one_run(),
        "shipped files": shipped(),
        "keys of files": {**accepted_keys(), "runbook, its sections": list(SECTIONS)},
        "severities of runbooks": list(SEVERITIES),
        "facts": facts(),
        "store": tables(),
        "spool": spool_line(),
        "checkpoints": checkpoints(),
        "heartbeats": ring(),
        "control": control(),
        "files of a node": node_files(),
        "plug-ins": plugins(),
    }


def exit_codes():
    """Return each exit code by its name, and that of each error that Python code may catch."""
    found = {name: value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    caught = [errors.GpuopsError, *_below(errors.GpuopsError)]
    return {
        **found,
        "interrupted": EXIT_INTERRUPTED,
        "closed pipe": EXIT_CLOSED_PIPE,
        "errors": {kind.__name__: kind.exit_code for kind in caught},
        "a checkpoint": CheckpointError.exit_code,
        "a damaged checkpoint": CorruptError.exit_code,
        "no such checkpoint": BadRequestError.exit_code,
    }


def _below(kind):
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from (child, *_below(child))


def settings():
    """Return each setting: its variable, flag, defaults, and what it makes of `PROBES`."""
    flags = run_flags()
    found = {}
    for setting in SETTINGS:
        flag = f"--{setting.env.removeprefix('GPUOPS_').lower().replace('_', '-')}"
        env = {"HOME": "/home/ada"}
        found[setting.key] = {
            "variable": setting.env,
            "flag of gpuops run": flag if flag in flags else None,
            "default": _plain(setting.default(env, False)),
            "default of root": _plain(setting.default(env, True)),
            "takes": [f"{probe!r}: {made}" for probe in PROBES if (made := _made(setting, probe))],
        }
    return found


def _made(setting, probe):
    try:
        return repr(_plain(setting.parse(probe)))
    except ValueError:
        return None


def _plain(value):
    return str(value) if isinstance(value, Path | GateMode) else value


def words_of_sources():
    """Return what can be told from the sources alone: variables, schemas, names of events."""
    files = [*(ROOT / "gpuops").rglob("*.py"), *(ROOT / "slurm").rglob("*")]
    texts = [path.read_text() for path in files if path.is_file()]
    literals = {
        node.value
        for path in files
        if path.suffix == ".py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    known = {setting.key for setting in SETTINGS} | {kind.value for kind in FailureClass}
    words = {word for word in literals if WORD.fullmatch(word) and not NO_WORD.fullmatch(word)}
    return {
        "variables": sorted({name for text in texts for name in VARIABLE.findall(text)}),
        "schemas": sorted(word for word in literals if SCHEMA.fullmatch(word)),
        "events and rules of decisions": sorted(words - known),
        "told by a keeper": sorted(literals.intersection(KEEPER_TELLS)),
        "keys of gate.decided": sorted(_keys_beside("gate.decided", files)),
    }


def _keys_beside(word, files):
    """Return the keys that the function which says *word* puts together."""
    for path in files:
        if path.suffix == ".py" and word in path.read_text():
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef) and word in ast.unparse(node):
                    return _literal_keys(node)
    raise AssertionError(f"no function says {word}")


def _literal_keys(function):
    tables = [node for node in ast.walk(function) if isinstance(node, ast.Dict)]
    return {key.value for table in tables for key in table.keys if isinstance(key, ast.Constant)}


def python_names():
    """Return what Python code may import, and how it is called."""
    # Read only: importing these two takes ten seconds.
    read = {
        f"gpuops.worker.adapters.{name}": _classes(ROOT / "gpuops/worker/adapters" / f"{name}.py")
        for name in ("huggingface", "lightning")
    }
    return {
        "gpuops": sorted(gpuops.__all__),
        "gpuops.Checkpointer": _methods(Checkpointer),
        "gpuops.Checkpointer.stats": shape(_stats()),
        **{f"gpuops.{call.__name__}": _signature(call) for call in (phase, progress, should_stop)},
        "gpuops.worker.adapters.dcp": {
            kind.__name__: _methods(kind) for kind in (GpuopsReader, GpuopsStager, GpuopsWriter)
        },
        **read,
    }


def _methods(kind):
    """Return how *kind* and what it defines itself is called; of a property only that it is one."""
    return {
        name: _signature(member) if callable(member) else "no call"
        for name, member in ((name, inspect.getattr_static(kind, name)) for name in vars(kind))
        if not name.startswith("_") or name in {"__init__", "__enter__", "__exit__"}
    }


def _stats():
    checkpointer = Checkpointer(model=torch.nn.Linear(1, 1))
    checkpointer.close(save=False)
    return checkpointer.stats


def _signature(call):
    """Return the parameters of *call* without their types, which may be ours."""
    parameters = inspect.signature(call).parameters.values()
    bare = [item.replace(annotation=inspect.Parameter.empty) for item in parameters]
    return str(inspect.Signature(bare))


def _classes(path):
    """Return the public classes of *path* with their methods, read only: they import a lot."""
    return {
        node.name: {
            item.name: _arguments(item.args)
            for item in node.body
            if isinstance(item, ast.FunctionDef)
            and (not item.name.startswith("_") or item.name == "__init__")
        }
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name.startswith("Gpuops")
    }


def _arguments(arguments):
    for item in ast.walk(arguments):
        if isinstance(item, ast.arg):
            item.annotation = None
    return ast.unparse(arguments)


def packaging():
    """Return what is installed under which name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {
        "name": project["name"],
        "scripts": sorted(project["scripts"]),
        "extras": sorted(project["optional-dependencies"]),
        "python": project["requires-python"],
        "entry points of others": [GROUP],
    }


def text():
    """Return the file's content."""
    return json.dumps(dump(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    os.umask(0o022)
    content = text()
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(content)
    else:
        sys.stdout.write(content)
