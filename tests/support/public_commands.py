"""The command line as users and their scripts see it: options, arguments, JSON."""

import json
import re
import tempfile
from pathlib import Path

import click
import torch
from click.testing import CliRunner
from torch.distributed.run import get_args_parser

from gpuops.agent.launch.options import help_text
from gpuops.checkpoint.storage.directory import DirectoryStore
from gpuops.cli.main import gpuops
from gpuops.cli.run_status import status
from gpuops.config.resolve import environ
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status
from gpuops.store.engine import open_store
from gpuops.store.ingest.batch import ingest
from gpuops.store.migrate import upgrade_store
from support.made_states import make_state, part, whole
from support.public_shape import shape
from support.stories import Teller, burnin, envelopes, story
from support.sweeps import events_of_sweep

W = torch.arange(24.0).reshape(6, 4)
RANKS = [
    {"model.w": part(W, slice(0, 4)), "model.b": whole(torch.ones(3).bfloat16())},
    {"model.w": part(W, slice(4, 6)), "model.b": whole(torch.ones(3).bfloat16())},
]
_OPTION = re.compile(r"^ {2}(-.*?)(?: {2,}.*)?$")
# What `gpuops facts` would have recorded of a healthy node and of one where nothing could be read.
RECORDING = {
    "schema": "gpuops.facts/1",
    "gpuops_version": "0.1.0",
    "node": "n1",
    "boot_id": "b",
    "since_boot_s": 100.0,
    "t_us": 1_700_000_000_000_000,
    "looks": {},
    "state": {},
}
PLAN = ("--nodes", "16", "--bytes-per-gpu", "12GB", "--nic-gbps", "84", "--disk-gbs", "30")


def commands():
    """Return every command with its parameters, by what is typed."""
    found = {}
    root = click.Context(gpuops, **gpuops.context_settings)
    _add(found, ("gpuops",), root)
    _add(found, ("gpuops", "run", "status"), click.Context(status, root))
    return found


def _add(found, words, context):
    command = context.command
    flags = command.get_help_option_names(context)
    parameters = {" ".join(param.opts): _parameter(param) for param in command.params}
    if command.add_help_option:
        parameters |= dict.fromkeys(sorted(flags), "help")
    found[" ".join(words)] = parameters
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            _add(found, (*words, name), click.Context(inner, context))


def _parameter(param):
    """Return what is to be known of *param*, without what is not so of it."""
    is_option = isinstance(param, click.Option)
    kind = param.type
    # The name of a function that reads the text is nobody's business.
    takes = "text" if isinstance(kind, click.types.FuncParamType) else kind.name
    told = {
        "is": "option" if is_option else "argument",
        "takes": "nothing" if is_option and param.is_flag else takes,
        "off": " ".join(param.secondary_opts),
        "choices": [str(item) for item in getattr(kind, "choices", ())],
        "range": _range(kind),
        "repeatable": param.multiple if is_option else param.nargs == -1,
        "words": max(param.nargs, 1),
        "required": param.required,
        "variable": param.envvar,
    }
    told = {name: value for name, value in told.items() if value not in (None, False, "", [], 1)}
    default = param.to_info_dict()["default"]
    return told if default is None or default is False else {**told, "default": _plain(default)}


def _range(kind):
    if not isinstance(kind, click.IntRange | click.FloatRange):
        return None
    low, high = "(["[not kind.min_open], ")]"[not kind.max_open]
    return f"{low}{kind.min}, {kind.max}{high}"


def _plain(value):
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str) else str(value)


def run_flags():
    """Return the flags of ``gpuops run``, torch's among them: whether each takes a value."""
    return _flags(help_text(get_args_parser(), {}))


def _flags(text):
    found = {}
    for line in text.splitlines():
        match = _OPTION.match(line)
        if match is None:
            continue
        spellings = match[1].split(", ")
        takes = any(" " in word for word in spellings)
        found |= {word.split()[0]: ("a value" if takes else "nothing") for word in spellings}
    return found


class Place:
    """A folder with a store, checkpoints and a home, and what runs ``gpuops`` in it."""

    def __init__(self, folder):
        self.folder = folder
        self.url = f"sqlite:///{folder / 'store.db'}"
        self.env = {
            name: None for name in environ() if name.startswith(("GPUOPS_", "SLURM", "XDG"))
        }
        self.env |= {"HOME": str(folder), "GPUOPS_STORE": self.url, "TERM": "dumb"}
        self.env |= {f"GPUOPS_{name}": str(folder / name) for name in ("SPOOL", "STATE", "RUN_DIR")}
        self.env |= {"SLURMD_NODENAME": "n1", "GPUOPS_CLUSTER": "c1"}

    def output(self, *words):
        """Return what ``gpuops *words`` prints."""
        args = [str(word) for word in words]
        return CliRunner().invoke(gpuops, args, env=self.env, catch_exceptions=False).stdout

    def as_json(self, *words):
        """Return the keys of what ``gpuops *words --json`` prints, and the schema it names."""
        text = self.output(*words, "--json")
        body = json.loads(text[text.index("{") :])
        return {"schema": body["schema"], "keys": shape(body)}


def outputs():
    """Return the keys of every JSON that commands print, by command."""
    with tempfile.TemporaryDirectory() as name:
        place = Place(Path(name))
        _fill_store(place.url)
        (place.folder / "facts.json").write_text(json.dumps(RECORDING))
        found = {"gpuops check --jsonl": _streamed(place)}
        for words in (*_of_checks(place), *_of_history(place), *_of_checkpoints(place)):
            shown = re.sub(r"[0-9a-f-]{36}", "ID", " ".join(map(str, words)).replace(name, "DIR"))
            found[f"gpuops {shown} --json"] = place.as_json(*words)
        return found


def _fill_store(url):
    upgrade_store(url)
    with open_store(url, mode="write") as store, store.begin() as connection:
        ingest(connection, envelopes([*story(), *_active_tests()]), 1)


def _active_tests():
    """Return a sweep, and a burn-in that failed, of the nodes of the story."""
    teller = Teller(1)
    for event in events_of_sweep():
        teller.add(event)
    found = Finding(
        check="gemm",
        entity=Entity(EntityKind.GPU, "GPU-1"),
        status=Status.FAIL,
        message="slow",
        failure_class=FailureClass.GPU_SLOW,
    )
    burnin(teller, "n1", "fail", findings=[found])
    return teller.lines


def _of_checks(place):
    judged = ("check", "--facts", place.folder / "facts.json")
    listed = [("check", "--list"), ("check", "--explain", "gpu_ecc"), ("config", "show")]
    listed += [("baseline", "show")]
    return [judged, *listed, ("drill", "list"), ("runbook", "--list"), ("runbook", "node.lost")]


def _streamed(place):
    lines = place.output("check", "--facts", place.folder / "facts.json", "--jsonl").splitlines()
    bodies = [json.loads(line) for line in lines]
    schemas = sorted({body["schema"] for body in bodies})
    return {
        schema: shape(*(body for body in bodies if body["schema"] == schema)) for schema in schemas
    }


def _of_history(place):
    incident = json.loads(place.output("incident", "ls", "--json"))["incidents"][0]["id"]
    history = [("report",), ("incident", "ls"), ("incident", "show", incident)]
    nodes = [("node", "ls"), ("node", "show", "n1"), ("repair", "n1", "--what", "a new fan")]
    nodes += [("sweep", "show"), ("sweep", "history", "--since", "2025-01-01")]
    return [
        *history,
        *nodes,
        ("db", "status"),
        ("db", "flush"),
        ("db", "replay"),
        ("run", "status"),
    ]


def _of_checkpoints(place):
    store = DirectoryStore(place.folder / "states")
    state = make_state(store, RANKS, step=10)
    store.pin(state, "paper")
    make_state(store, RANKS, step=20)
    where = ("--dir", store.address)
    kept = [("ls", store.address), ("show", "10", *where), ("verify", *where)]
    moved = [("export", *where, "--to", place.folder / "out"), ("prune", "--dry-run", *where)]
    back = ("import", place.folder / "out", "--from", "safetensors", "--step", "30", *where)
    return [("ckpt", *words) for words in (*kept, *moved, back, ("plan", *PLAN))]
