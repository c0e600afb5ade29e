"""Real etcd members of our own, on free loopback ports, with their data in memory."""

import contextlib
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gpuops.control.etcd.store import EtcdControlStore
from gpuops.control.store import ControlStoreError
from support.ports import free_ports
from support.services import unavailable

START_S = 60
REQUEST_BYTES_MAX = 8 * 2**20


def find_etcd():
    """Return the etcd of this machine; skip (in CI: fail) where there is none."""
    found = shutil.which("etcd")
    if found is None:
        unavailable("etcd is not installed (etcd-server)")
    return found


@dataclass
class EtcdMember:
    """One member; it keeps its data when it is killed and started again."""

    name: str
    folder: Path
    client_port: int
    peer_port: int
    cluster: str
    flags: tuple[str, ...] = ()
    process: subprocess.Popen | None = field(default=None, init=False)

    def start(self):
        """Start it; it serves once a majority runs."""
        client, peer = (f"http://127.0.0.1:{port}" for port in (self.client_port, self.peer_port))
        words = [find_etcd(), "--name", self.name, "--data-dir", self.folder / self.name]
        words += ["--listen-client-urls", client, "--advertise-client-urls", client]
        words += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        words += ["--initial-cluster", self.cluster, "--log-level", "error", *self.flags]
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                words, cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )

    def signal(self, number):
        """Send it *number*."""
        self.process.send_signal(number)

    def kill(self):
        """End it at once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(START_S)
            self.process = None


@dataclass
class EtcdServers:
    """The members of one etcd."""

    members: list[EtcdMember]

    @property
    def url(self):
        """Return where they meet."""
        ports = (member.client_port for member in self.members)
        return "etcd://" + ",".join(f"127.0.0.1:{port}" for port in ports)

    def wait(self):
        """Wait until they answer."""
        end_s = time.monotonic() + START_S
        while True:
            store = EtcdControlStore(self.url, run_key="is it there", deadline_s=1.0)
            with contextlib.closing(store):
                try:
                    store.get("k")
                except ControlStoreError:
                    assert time.monotonic() < end_s, self.said()
                else:
                    return

    def said(self):
        """Return what they logged."""
        logs = [member.folder / f"{member.name}.log" for member in self.members]
        return "\n".join(log.read_text()[-2000:] for log in logs)


@contextlib.contextmanager
def running_etcd(n=1, *flags, max_request_bytes=REQUEST_BYTES_MAX):
    """Yield *n* members, which end with the block."""
    find_etcd()
    shm = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=shm) as folder:
        free = free_ports(2 * n)
        ports = list(zip(free[:n], free[n:], strict=True))
        cluster = ",".join(
            f"m{i}=http://127.0.0.1:{peer}" for i, (_client, peer) in enumerate(ports)
        )
        flags = (f"--max-request-bytes={max_request_bytes}", *flags)
        members = [
            EtcdMember(f"m{i}", Path(folder), client, peer, cluster, flags)
            for i, (client, peer) in enumerate(ports)
        ]
        found = EtcdServers(members)
        try:
            for member in members:
                member.start()
            found.wait()
            yield found
        finally:
            for member in members:
                if member.process is not None:
                    member.signal(signal.SIGCONT)
                member.kill()


@pytest.fixture(scope="session")
def etcd_url():
    """The address of an etcd of this session, for tests that do not break it."""
    with running_etcd() as found:
        yield found.url
