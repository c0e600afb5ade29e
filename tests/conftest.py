"""Every test starts without the user's gpuops settings and writes below its own directory."""

import gc
import importlib
import os
import resource
import signal
import tempfile
from pathlib import Path

import pytest

# Else the collector goes through the modules of all tests again and again: a third of their import.
gc.set_threshold(50_000, 20, 50)

# A failure in a helper says why, too.
pytest.register_assert_rewrite("support")

# Processes that tests start, and this one: without torch's compiler, until somebody asks for it.
# Before other helpers: `support.warm_python` starts a process with the environment of its import.
_LIGHT_TORCH = Path(__file__).parent / "support" / "light_torch"
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(_LIGHT_TORCH), os.environ.get("PYTHONPATH")))
)
importlib.import_module("support.light_torch.sitecustomize")

from support.draws import load_profile  # noqa: E402
from support.etcd import etcd_url  # noqa: E402, F401
from support.order import spread  # noqa: E402
from support.postgres import (  # noqa: E402, F401 fixtures for every test
    guarded_postgres,
    postgres_server,
    postgres_url,
)
from support.quick_disk import quick_folder  # noqa: E402
from support.store_urls import empty_store_url, store_url  # noqa: E402, F401 the same

load_profile()


@pytest.fixture(scope="session", autouse=True)
def _no_core_files():
    # Some tests crash a process on purpose, in the checkout.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def pytest_configure():
    """Heed Ctrl-C in the process that hands out the tests as well as in those that run them."""
    # A shell starts what runs in the background with SIGINT ignored, and all it starts in turn.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)  # after the tests that a command line leaves out have gone
def pytest_collection_modifyitems(items):
    """Let the long waits begin in all processes of xdist at once."""
    n_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if n_workers > 1:
        paths = [item.nodeid.partition("::")[0] for item in items]
        items[:] = [items[index] for index in spread(paths, n_workers)]


def pytest_collection_finish():
    """Have the collector leave alone what was imported: it stays until the end."""
    gc.freeze()


@pytest.fixture(scope="session")
def _quick_folder():
    # Of the session and not of a test: what a test started in the background may write after it.
    folder = quick_folder()
    if folder is None:
        yield None
        return
    with tempfile.TemporaryDirectory(
        prefix="pytest-", dir=folder, ignore_cleanup_errors=True
    ) as made:
        yield Path(made)


@pytest.fixture
def tmp_path(request, tmp_path):
    """A folder of the test's own; for a test marked ``quick_disk`` one in memory."""
    if request.node.get_closest_marker("quick_disk") is None:
        return tmp_path
    folder = request.getfixturevalue("_quick_folder")
    return tmp_path if folder is None else Path(tempfile.mkdtemp(dir=folder))


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path):
    import os

    for name in os.environ:
        if name.startswith(("GPUOPS_", "SLURM", "PET_")) and not name.startswith("GPUOPS_TEST_"):
            monkeypatch.delenv(name)
    # Some machines set it; it would hide that output is kept back.
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg-config"))
    # Not the XDG defaults: root's are system directories.
    monkeypatch.setenv("GPUOPS_STORE", f"sqlite:///{tmp_path}/default/gpuops.db")
    for name in ("SPOOL", "STATE", "RUN_DIR"):
        monkeypatch.setenv(f"GPUOPS_{name}", str(tmp_path / "default" / name.lower()))
