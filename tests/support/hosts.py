"""Several hosts on one machine: network namespaces joined by a bridge, each with an address.

What a killed test session left is found by the alias of its bridge, which names the process that
made it, and removed by the next one. Where there may be no namespaces, `Loopbacks` gives addresses
only.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gpuops.host.procfs import process
from support.services import unavailable
from support.warm_python import warm_popen

NOBODY = "02:00:00:00:00:00"  # the hardware address of no host
PREFIX = "gob"  # names of links have at most 15 characters
SUBNETS = 4096
END_S = 60  # one that syncs to a busy disk takes SIGKILL after that
_PAUSE = threading.Event()


def run_ip(*words, check=True):
    """Run ``ip`` with *words*; return what it printed."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False, timeout=30)
    if check and done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def why_no_namespaces():
    """Return why there can be no namespaces here, None where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "ip (iproute2) is not installed"
    name = f"{PREFIX}try{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return f"network namespaces cannot be made here: {done.stderr.strip()}"
    run_ip("netns", "delete", name)
    return None


def need_namespaces():
    """Skip (in CI: fail) where there can be no namespaces."""
    why = why_no_namespaces()
    if why is not None:
        unavailable(why)


@dataclass
class Host:
    """One host: its node name, its address, its folder. ``namespace`` None: this very machine."""

    name: str
    address: str
    folder: Path
    namespace: str | None = None
    link: str | None = None  # our end of its cable
    processes: list = field(default_factory=list)

    @property
    def runs(self):
        """Return where its runs go."""
        return self.folder / "runs"

    def environment(self, env=None):
        """Return this process' environment with this host's name, store, spool and folders."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("GPUOPS_", "SLURM"))}
        return {
            **kept,
            "SLURMD_NODENAME": self.name,
            "GPUOPS_STORE": f"sqlite:///{self.folder}/gpuops.db",
            "GPUOPS_SPOOL": str(self.folder / "spool"),
            "GPUOPS_STATE": str(self.folder / "state"),
            "GPUOPS_RUN_DIR": str(self.runs),
            "OMP_NUM_THREADS": "1",
            **({"GLOO_SOCKET_IFNAME": "eth0"} if self.namespace else {}),
            **(env or {}),
        }

    def words(self, command):
        """Return the command line that runs *command* on this host."""
        prefix = ["ip", "netns", "exec", self.namespace] if self.namespace else []
        return [*prefix, *map(str, command)]

    def popen(self, command, env=None, **options):
        """Start *command* on this host, in a process group of its own."""
        self.folder.mkdir(parents=True, exist_ok=True)
        child = warm_popen(
            self.words(command),
            env=self.environment(env),
            start_new_session=True,
            **options,
        )
        self.processes.append(child)
        return child

    def run(self, *command, env=None, timeout=60):
        """Return the finished *command*."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return subprocess.run(
            self.words(command),
            env=self.environment(env),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def gpuops(self, *args, env=None, timeout=60):
        """Return the finished ``gpuops *args`` on this host."""
        return self.run(sys.executable, "-m", "gpuops", *args, env=env, timeout=timeout)

    def cut(self):
        """Pull the cable."""
        run_ip("link", "set", "dev", self.link, "down")

    def heal(self):
        """Put the cable back."""
        run_ip("link", "set", "dev", self.link, "up")

    def slow(self, delay_ms):
        """Delay what reaches this host; skip where the kernel cannot."""
        words = ["dev", self.link, "root", "netem", "delay", f"{delay_ms:g}ms"]
        done = subprocess.run(
            ["tc", "qdisc", "replace", *words], capture_output=True, text=True, check=False
        )
        if "unknown" in done.stderr:
            pytest.skip("this kernel has no sch_netem")
        assert done.returncode == 0, done.stderr

    def throttle(self, kbit, *, burst_kb=16, queue_ms=400):
        """Let only so much reach this host."""
        rate = ["rate", f"{kbit}kbit", "burst", f"{burst_kb}kb"]
        shape = ["tbf", *rate, "latency", f"{queue_ms}ms"]
        words = ["tc", "qdisc", "replace", "dev", self.link, "root", *shape]
        subprocess.run(words, check=True, capture_output=True)

    def unslow(self):
        """Undo `slow` and `throttle`."""
        words = ["tc", "qdisc", "del", "dev", self.link, "root"]
        subprocess.run(words, check=False, capture_output=True)

    def pids(self):
        """Return the processes of this host."""
        if self.namespace is not None:
            return [int(word) for word in run_ip("netns", "pids", self.namespace).split()]
        return [pid for child in self.processes for pid in _session(child.pid)]

    def signal(self, number):
        """Signal every process of this host."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def freeze(self):
        """Stop every process of this host."""
        self.signal(signal.SIGSTOP)

    def thaw(self):
        """Let them go on."""
        self.signal(signal.SIGCONT)

    def kill_all(self):
        """End every process of this host at once, as a power cut does; wait until they are gone.

        Raises:
            AssertionError: Some cannot be ended.
        """
        until = time.monotonic() + END_S
        while left := [pid for pid in self.pids() if _is_alive(pid)]:
            assert time.monotonic() < until, f"{self.name}: these cannot be ended: {left}"
            self.signal(signal.SIGKILL)
            _PAUSE.wait(0.02)
        for child in self.processes:
            child.wait(END_S)


class Several:
    """Hosts in order, which end together."""

    hosts = ()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __iter__(self):
        return iter(self.hosts)

    def __getitem__(self, index):
        return self.hosts[index]

    def __len__(self):
        return len(self.hosts)

    def close(self):
        """End everything that runs on them."""
        for host in self.hosts:
            host.kill_all()


class Hosts(Several):
    """*n* hosts on a bridge of their own: ``10.x.y.11`` and on; the bridge is ``10.x.y.1``."""

    def __init__(self, n, folder, *, names=None):
        need_namespaces()
        sweep()
        self.bridge, self.subnet = _claim_bridge()
        self.address = f"{self.subnet}.1"  # of the machine around them
        self.hosts = []
        self._lost = []  # who cannot send to whom
        try:
            run_ip("addr", "add", f"{self.address}/24", "dev", self.bridge)
            run_ip("link", "set", "dev", self.bridge, "up")
            for index in range(n):
                name = names[index] if names else f"n{index}"
                self.hosts.append(self._make(index, name, Path(folder) / name))
        except BaseException:
            self.close()
            raise

    def _make(self, index, name, folder):
        namespace, link = f"{self.bridge}h{index}", f"{self.bridge}v{index}"
        address = f"{self.subnet}.{11 + index}"
        run_ip("netns", "add", namespace)
        inner = ["name", "eth0", "netns", namespace]
        run_ip("link", "add", link, "type", "veth", "peer", *inner)
        run_ip("link", "set", "dev", link, "master", self.bridge, "up")
        run_ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        run_ip("-n", namespace, "link", "set", "dev", "lo", "up")
        run_ip("-n", namespace, "link", "set", "dev", "eth0", "up")
        return Host(name=name, address=address, folder=folder, namespace=namespace, link=link)

    def cable(self, one, other):
        """Lay a cable ``eth1`` between two hosts, over which all goes that they send each other."""
        ends = one.namespace, other.namespace
        run_ip(
            *("-n", ends[0], "link", "add", "eth1", "type", "veth"),
            *("peer", "name", "eth1", "netns", ends[1]),
        )
        for host, peer in ((one, other), (other, one)):
            run_ip("-n", host.namespace, "link", "set", "dev", "eth1", "up")
            route = f"{peer.address}/32", "dev", "eth1", "src", host.address
            run_ip("-n", host.namespace, "route", "add", *route)

    def partition(self, *groups):
        """Let hosts reach those of their own group alone; one in no group reaches nobody."""
        self.heal()
        group_of = {host.name: number for number, group in enumerate(groups) for host in group}
        for one in self.hosts:
            for other in self.hosts:
                own = group_of.get(one.name)
                if one is not other and (own is None or own != group_of.get(other.name)):
                    self.lose(one, other)

    def lose(self, one, other):
        """Let nothing that *one* sends reach *other*, until `heal`."""
        _neighbour(one, "replace", other, "lladdr", NOBODY, "nud", "permanent")
        self._lost.append((one, other))

    def heal(self):
        """Let all hosts reach each other again."""
        while self._lost:
            one, other = self._lost.pop()
            _neighbour(one, "delete", other)

    def close(self):
        """End everything that runs on them and remove them."""
        super().close()
        remove(self.bridge)


def _neighbour(one, act, other, *words):
    run_ip("-n", one.namespace, "neigh", act, other.address, *words, "dev", "eth0")


class Loopbacks(Several):
    """*n* hosts that are names and loopback addresses only: for tests of many agents."""

    def __init__(self, n, folder):
        self.address = "127.0.0.1"
        self.hosts = [
            Host(name=f"n{index}", address="127.0.0.1", folder=Path(folder) / f"n{index}")
            for index in range(n)
        ]


def sweep():
    """Remove the hosts of sessions that were killed."""
    for line in run_ip("-o", "link", "show", "type", "bridge").splitlines():
        name = line.split(":")[1].strip().partition("@")[0]
        if name.startswith(PREFIX):
            alias = _alias(name).split()
            if len(alias) == 2 and not _still_runs(*alias):
                remove(name)


def remove(bridge):
    """Remove *bridge*, its namespaces and every process in them."""
    for line in run_ip("netns", "list").splitlines():
        namespace = line.split()[0]
        if namespace.startswith(f"{bridge}h"):
            for pid in run_ip("netns", "pids", namespace, check=False).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            run_ip("netns", "delete", namespace, check=False)
    # The kernel takes a namespace down later; its cable must be gone before its name is used.
    for line in run_ip("-o", "link", "show", "type", "veth").splitlines():
        link = line.split(":")[1].strip().partition("@")[0]
        if link.startswith(f"{bridge}v"):
            run_ip("link", "delete", link, check=False)
    run_ip("link", "delete", bridge, check=False)


def _claim_bridge():
    """Return a new bridge and its subnet; that its name can be given once only is the lock."""
    start = os.getpid() % SUBNETS
    for number in (*range(start, SUBNETS), *range(start)):
        name = f"{PREFIX}{number:x}"
        done = subprocess.run(
            ["ip", "link", "add", name, "type", "bridge"],
            capture_output=True,
            check=False,
        )
        if done.returncode == 0:
            mine = process(os.getpid())
            run_ip("link", "set", "dev", name, "alias", f"{mine.pid} {mine.start_ticks}")
            return name, f"10.{200 + number // 256}.{number % 256}"
    raise RuntimeError("no bridge is free")


def _alias(link):
    with contextlib.suppress(OSError):
        return Path(f"/sys/class/net/{link}/ifalias").read_text().strip()
    return ""


def _still_runs(pid, start_ticks):
    found = process(int(pid))
    return found is not None and str(found.start_ticks) == start_ticks


def _is_alive(pid):
    found = process(pid)
    return found is not None and found.state not in "ZX"


def _session(leader):
    """Return the processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader and fields[0] not in "ZX":
                found.append(int(path.parent.name))
    return found
