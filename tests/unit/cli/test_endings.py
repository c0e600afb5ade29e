"""What a command does at its end: its record survives a signal, a silent store is said."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpuops.cli.options import warn_unless_stored

RECORDS = """
import os, signal, sys
from pathlib import Path
from gpuops.gate.record import RecordOptions, record
from gpuops.host.clock import SystemClock
from gpuops.store.events import new_event

folder, number = Path(sys.argv[1]), int(sys.argv[2])
options = RecordOptions(
    spool_dir=folder / "spool", spool_bytes_max=2**26, root=folder, config_file=None,
    environ={"GPUOPS_STORE": "sqlite:////proc/none/store.db", "GPUOPS_SPOOL": "/proc/none"},
)

def events():
    os.kill(os.getppid(), number)
    return [new_event("node.seen", node="n1", clock=SystemClock())]

def raised(*_):
    raise KeyboardInterrupt

signal.signal(number, raised)
try:
    record(events, "n1", options, SystemClock(), deadline_s=60.0)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_result_is_recorded_takes_effect_after_it(tmp_path, number):
    words = [sys.executable, "-c", RECORDS, str(tmp_path), str(int(number))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)

    assert done.returncode == 130, done.stderr
    spooled = [path.read_text() for path in (tmp_path / "spool").rglob("*") if path.is_file()]
    assert '"node.seen"' in "".join(spooled)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("postgresql+psycopg://x:y@127.0.0.1:1/none", "127.0.0.1"),
        ("sqlite:///{folder}/text.db", "file is not a database"),
        ("sqlite:////dev/null/store.db", "cannot make /dev/null"),
        ("sqlite:///{folder}/new.db", None),
    ],
    ids=["no answer", "no database", "no folder", "usable"],
)
def test_a_store_that_cannot_take_what_was_spooled_is_said(tmp_path, capsys, url, why):
    (tmp_path / "text.db").write_text("no database" * 1000)
    warn_unless_stored(url.format(folder=tmp_path), tmp_path / "spool", Path("/"))
    err = capsys.readouterr().err

    if why is None:
        assert err == ""
    else:
        assert err.startswith(f"gpuops: spooled in {tmp_path}/spool, the store has it after")
        assert why in err
        assert err.count("\n") == 1
