"""``python -m gpuops.control.etcd.member``: one etcd of a run, which ends with the run.

It copies its agent's certificates, starts ``etcd`` and prints one line, ``ready`` or
``failed WHY``. Like the server of `gpuops.control.tcp.serve` it outlives the agent that started it.
It ends, with its etcd and all that it wrote, when the run was cleaned up, or when no agent has
written for the lease, or when it was so long without a majority.

The data lie in memory (``/dev/shm``), because an election follows each disk that is slow to sync.
A member that is lost is never started again, so that none comes back without what it has agreed to.
"""

import argparse
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gpuops.config.resolve import environ
from gpuops.control.etcd.address import SCHEME, EtcdAddress
from gpuops.control.etcd.credentials import copy_credentials, write_credentials
from gpuops.control.etcd.folders import locked_folder, own_folders
from gpuops.control.etcd.store import EtcdControlStore
from gpuops.control.store import (
    VALUE_BYTES_MAX,
    ControlStoreError,
    ControlStoreResetError,
    ControlStoreUnreachableError,
)
from gpuops.host.process.sidecar import report_and_detach

LEASE_S = 120.0
CHECK_S = 1.0
SOON_S = 0.2
GUEST_ADDRESS = "127.0.0.1"  # nobody connects to a guest
LINGER_S = 4 * CHECK_S
TOKEN_BYTES_MAX = 4096
_PREFIX, _NAME, _END = "gpuops-etcd-", "name", "end"  # a member's folder, and files in it
_PR_SET_PDEATHSIG = 1
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_FIXED_FLAGS = (
    "--initial-cluster-state=new",
    "--pre-vote=true",  # a member that was cut off does not unseat the leader when it is back
    f"--max-request-bytes={2 * VALUE_BYTES_MAX}",
    "--auto-compaction-mode=revision",
    "--auto-compaction-retention=1000",
    "--snapshot-count=10000",
    "--max-wals=1",
    "--client-cert-auth",
    "--peer-client-cert-auth",
    "--log-level=error",
)


def etcd_command(options: argparse.Namespace, folder: Path, files: dict[str, str]) -> list[str]:
    """Return the command line of etcd for this member."""
    host = f"[{options.address}]" if ":" in options.address else options.address
    client, peer = (f"https://{host}:{port}" for port in (options.client_port, options.peer_port))
    command = ["etcd", f"--name={options.name}", f"--data-dir={folder / 'data'}", *_FIXED_FLAGS]
    command += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
    command += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
    command += [f"--initial-cluster={options.cluster}"]
    command += [f"--initial-cluster-token={options.cluster_token}"]
    for prefix in ("", "peer-"):
        command += [f"--{prefix}trusted-ca-file={files['cacert']}"]
        command += [f"--{prefix}cert-file={files['cert']}", f"--{prefix}key-file={files['key']}"]
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until nobody needs it; return 0, or etcd's exit code where that ends first."""
    options = _options(argv)
    with os.fdopen(0, "rb", closefd=False) as file:
        token = file.read(TOKEN_BYTES_MAX).decode()
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    try:
        folder, _mark = locked_folder(_PREFIX, _parent())
        (folder / _NAME).write_text(options.name)
    except OSError as exc:
        report_and_detach(f"failed {exc}")
        return 1
    try:
        return _serve(options, token, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _parent() -> Path:
    memory = "/dev/shm"  # noqa: S108 a private folder in it
    return Path(memory if os.access(memory, os.W_OK) else tempfile.gettempdir())


def request_end(name: str) -> None:
    """Ask the member *name*, if it runs on this node, to end."""
    for folder in own_folders(_PREFIX, _parent()):
        with suppress(OSError):
            if (folder / _NAME).read_text() == name:
                (folder / _END).touch()


def _serve(options: argparse.Namespace, token: str, folder: Path) -> int:
    try:
        files = copy_credentials(options.credentials, folder)
        etcd = _start(etcd_command(options, folder, files), folder)
        _check_runs(etcd, folder)
    except (ControlStoreError, OSError) as exc:
        report_and_detach(f"failed {exc}")
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    report_and_detach("ready")
    try:
        return _watch(etcd, options, token, folder, files)
    finally:
        with suppress(ProcessLookupError):
            etcd.kill()
        etcd.wait()


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gpuops.control.etcd.member")
    for name in ("name", "address", "cluster", "cluster-token", "run-key"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--client-port", type=int, required=True)
    parser.add_argument("--peer-port", type=int, required=True)
    parser.add_argument("--credentials", type=Path, required=True)
    parser.add_argument("--lease", type=float, default=LEASE_S)
    return parser.parse_args(argv)


def _start(command: list[str], folder: Path) -> "subprocess.Popen[bytes]":
    def end_with_us() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)

    program = shutil.which(command[0])
    if program is None:
        raise ControlStoreError("etcd is not installed")
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            env={**environ(), "GOMAXPROCS": "2"},
            preexec_fn=end_with_us,  # noqa: PLW1509 this process has one thread
        )


def _check_runs(etcd: "subprocess.Popen[bytes]", folder: Path) -> None:
    """Raise if *etcd* ends at once: it does not know a flag, or cannot listen."""
    with suppress(subprocess.TimeoutExpired):
        code = etcd.wait(SOON_S)
        lines = (folder / "log").read_text(errors="replace").strip().splitlines() or ["no message"]
        raise ControlStoreError(f"exit {code}, {lines[-1]}")


def _watch(
    etcd: "subprocess.Popen[bytes]",
    options: argparse.Namespace,
    token: str,
    folder: Path,
    files: dict[str, str],
) -> int:
    url = member_url([(options.address, options.client_port)], files)
    store = EtcdControlStore(url, run_key=options.run_key, token=token)
    pause = threading.Event()
    revision, changed_s = 0, time.monotonic()
    while time.monotonic() - changed_s < options.lease and not (folder / _END).exists():
        code = etcd.poll()
        if code is not None:
            return code
        try:
            store.get("over")
        except ControlStoreResetError:
            # The last agent of the run has cleaned up; the other members learn it by a majority.
            pause.wait(LINGER_S)
            return 0
        except ControlStoreUnreachableError:
            pass
        if store.revision != revision:
            revision, changed_s = store.revision, time.monotonic()
        pause.wait(CHECK_S)
    return 0


def connect_as_guest(
    endpoint: str, *, run_key: str, token: str, deadline_s: float
) -> EtcdControlStore:
    """Return the control store that the members at *endpoint* hold, with certificates of our own.

    Raises:
        ControlStoreError: *endpoint* is malformed, or openssl is missing.
    """
    members = EtcdAddress.parse(endpoint).members
    with tempfile.TemporaryDirectory(prefix="gpuops-guest-") as folder:
        url = member_url(members, write_credentials(Path(folder), token, GUEST_ADDRESS))
        return EtcdControlStore(url, run_key=run_key, token=token, deadline_s=deadline_s)


def member_url(members: Sequence[tuple[str, int]], files: dict[str, str]) -> str:
    """Return the URL of *members*, in this order, for one who has *files*."""
    hosts = ",".join(
        f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in members
    )
    return f"{SCHEME}{hosts}?" + "&".join(f"{name}={path}" for name, path in files.items())


if __name__ == "__main__":
    sys.exit(main())
