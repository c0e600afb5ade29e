"""The files that users read and write: what is shipped, and which keys each kind of file takes."""

import dataclasses
import re
import tempfile
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path

from gpuops.burnin.baseline_file import load_baselines
from gpuops.checks import NAMES, check_named
from gpuops.checks.core.profile_files import load_profiles
from gpuops.checks.core.silence import load_silences
from gpuops.checks.core.suite import load_suite
from gpuops.checks.core.xid_catalogue import load_sxids, load_xids
from gpuops.config.resolve import resolve
from gpuops.errors import ConfigError
from gpuops.incident.runbook import load_runbooks
from gpuops.resources import data_dir
from gpuops.rules import load_rules

_VALID = re.compile(r"\(valid: (.*?)\)")
_NO_KEY = "no_such_key"


def shipped():
    """Return what the shipped folders hold, as far as somebody may have it in a script."""
    folders = {name: data_dir(name) for name in ("checks", "runbooks", "slurm")}
    files = {
        name: sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        for name, folder in folders.items()
    }
    checks = folders["checks"]
    return {
        "files": files,
        "suites": {path.stem: _suite(path) for path in sorted(checks.glob("suites/*.toml"))},
        "profiles": {
            path.stem: _flat(tomllib.loads(path.read_text()))
            for path in sorted(checks.glob("profiles/*.toml"))
        },
        "log rules": _rules(checks / "rules"),
        "xids": {str(code): _xid(kind) for code, kind in load_xids([checks / "xid"]).items()},
        "sxids": {
            str(code): kind.sxid_class for code, kind in load_sxids([checks / "xid"]).items()
        },
        "runbooks": _runbooks(folders["runbooks"]),
    }


def _suite(path):
    table = tomllib.loads(path.read_text())
    checks = {entry.pop("name"): _flat(entry) for entry in table.pop("check", [])}
    return {**_flat(table), "checks": checks}


def _flat(table, before=""):
    flat = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{before}{key}.")
        elif key != "about":
            flat[before + key] = value
    return flat


def _rules(folder):
    return {
        rule.id: {
            "pattern": rule.pattern.pattern,
            "failure_class": rule.failure_class.value,
            "source": rule.source.value,
            "role": rule.role.value,
            "side": rule.side.value,
            "status": rule.status.word,
            "check": rule.check,
        }
        for rule in load_rules([folder])
    }


def _xid(kind):
    of = kind.failure_class
    return " ".join([kind.xid_class.value, *([] if of is None else [of.value])])


def _runbooks(folder):
    return {
        of.value: f"{page.severity} {page.side.value} {page.action.value}"
        for of, page in load_runbooks(folder).items()
    }


def accepted_keys():
    """Return the keys that each kind of file takes: a wrong one is refused with the valid ones."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ask = _Asker(folder)
        return {
            "suite": ask(load_suite_in, ""),
            "suite, its check": {check: ask(load_suite_in, _entry(check)) for check in NAMES},
            "suite, a check of the site's": ask(load_suite_in, _entry("site/fan")),
            "suite, its unknown": ask(load_suite_in, _SUITE + "[unknown]\nno_such_key = 1\n"),
            "profile": ask(load_profiles_in, ""),
            "profile, its match": ask(load_profiles_in, "[match]\nno_such_key = 1\n"),
            "baseline": ask(load_baselines_in, ""),
            "baseline, a floor": ask(
                load_baselines_in, 'shape = "x"\n[[floor]]\nno_such_key = 1\n'
            ),
            "silences": ask(load_silences_in, ""),
            "silences, a silence": ask(load_silences_in, "[[silence]]\nno_such_key = 1\n"),
            "rules": ask(load_rules_in, ""),
            "rules, a rule": ask(load_rules_in, "[[rule]]\nno_such_key = 1\n"),
            "xid": ask(load_xids_in, ""),
            "xid, an xid": ask(load_xids_in, "[[xid]]\nno_such_key = 1\n"),
            "xid, an sxid": ask(load_sxids_in, "[[sxid]]\nno_such_key = 1\n"),
            "configuration": ask(resolve_in, ""),
            "runbook, its front matter": ask.of_runbook(),
        }


_SUITE = 'deadline_s = 1\n[[check]]\nname = "site/fan"\ntimeout_s = 1\n'


def _entry(check):
    return f'deadline_s = 1\n[[check]]\nname = "{check}"\ntimeout_s = 1\nno_such_key = 1\n'


def load_suite_in(folder):
    load_suite("file", [folder])


def load_profiles_in(folder):
    load_profiles([folder])


def load_baselines_in(folder):
    load_baselines([folder])


def load_silences_in(folder):
    load_silences([folder / "file.toml"])


def load_rules_in(folder):
    load_rules([folder])


def load_xids_in(folder):
    load_xids([folder])


def load_sxids_in(folder):
    load_sxids([folder])


def resolve_in(folder):
    resolve({}, {}, config_file=folder / "file.toml", is_root=False)


class _Asker:
    """Has a file with a wrong key read, and returns the right ones, which the refusal names."""

    def __init__(self, folder):
        self._folder = folder

    def __call__(self, load, text):
        (self._folder / "file.toml").write_text(text or f"{_NO_KEY} = 1\n")
        return self._refusal(load)

    def of_runbook(self):
        front = f"+++\n{_NO_KEY} = 1\n+++\n\n## What you see\n"
        (self._folder / "node.lost.md").write_text(front)
        return self._refusal(load_runbooks)

    def _refusal(self, load):
        said = self._said(load)
        valid = _VALID.search(said)
        assert _NO_KEY in said, said
        assert valid is not None, said
        return valid[1].split(", ")

    def _said(self, load):
        try:
            load(self._folder)
        except ConfigError as exc:
            return str(exc)
        return f"{_NO_KEY} was taken"


def facts():
    """Return the form of a recording: the facts of each probe, and the probe of each check."""
    looks = {name: check_named(name).probe for name in NAMES}
    return {
        "looks of checks": {name: look.name for name, look in looks.items()},
        "facts of looks": {look.name: _fields(look.facts) for look in looks.values()},
        "parameters of checks": {name: _fields(check_named(name).parameters) for name in NAMES},
    }


def _fields(kind):
    """Return the keys of *kind*, a dataclass, and what each holds; without the names of classes."""
    hints = typing.get_type_hints(kind)
    found = {}
    for field in dataclasses.fields(kind):
        word, inner = _kind(hints[field.name])
        found[field.name] = word
        found |= {f"{field.name}.{key}": value for key, value in inner.items()}
    return found


def _kind(hint):
    arguments = [item for item in typing.get_args(hint) if item not in (type(None), ...)]
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return "table", _fields(hint)
    if origin is None:
        bases = [base for base in (str, bool, int, float) if issubclass(hint, base)]
        return (bases[0].__name__ if bases else "any"), {}
    word, inner = _kind(arguments[-1])
    if origin is Mapping or origin is dict:
        return f"table of {word}", inner
    if origin in (tuple, frozenset, list):
        return f"list of {word}", inner
    return f"{word} or null", inner
