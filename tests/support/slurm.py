"""A real Slurm of our own: munged, slurmctld and several slurmd on loopback, with our hooks.

Every node is a folder: a fake root, a mock NVML scenario, a state folder and a spool. The hooks are
the shipped ones with three paths changed, as slurm/README.md tells an operator to.
"""

import contextlib
import json
import os
import pwd
import re
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from support import slurm_processes
from support.fake_root import FakeRoot
from support.mock_nvml import UUIDS, addresses, shape
from support.patient import patient_install
from support.ports import free_ports
from support.quick_disk import quick_home
from support.services import unavailable
from support.slurm_processes import end_all, processes_of

NODES = ("n1", "n2", "n3", "n4", "n5", "n6")
GPUS = 8
# The numbers of this node's device files are not their places in gres.conf.
SHIFTED, SHIFTED_BY = "n6", 10
HOOKS = ("prolog.sh", "epilog.sh", "health_check.sh")
SHIPPED = Path(__file__).parents[2] / "slurm"
START_S = 60
LIMIT_S = 240  # of anything that is waited for, on a busy machine
HOOK_LIMIT_S = (
    120  # of each hook of ours; the shipped limits: tests/integration/test_slurm_files.py
)
_TRIES = 4

CONF = """\
ClusterName=gpuops
SlurmctldHost=localhost
SlurmctldPort={ctld_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/socket/munge,cred_expire=5
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/slurmd/%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=nohold_on_prolog_fail,batch_sched_delay=0,sched_min_interval=0,\
sched_interval=1,bf_interval=1
Prolog={home}/hooks/prolog.sh
Epilog={home}/hooks/epilog.sh
PrologFlags=Alloc
PrologEpilogTimeout=150
MessageTimeout=150
HealthCheckProgram={home}/hooks/health_check.sh
HealthCheckInterval=2
HealthCheckNodeState=ANY
RequeueExit=85
JobRequeue=1
KillWait=2
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

# The hooks' HOOK_ENV: what is particular to each node of this one machine. A health check runs only
# while a test asks for it: six nodes would start Python every two seconds. One at a time, as where
# the interval is minutes: slurmctld asks for the next one though the last has not ended.
HOOK_ENV = """\
. {home}/nodes/$SLURMD_NODENAME/env
export SLURM_CONF={home}/slurm.conf
if [ -z "$SLURM_JOB_ID" ]; then
    [ -e {home}/nodes/$SLURMD_NODENAME/health ] || exit 0
    exec 9>{home}/nodes/$SLURMD_NODENAME/health.lock
    flock --nonblock 9 || exit 0
fi
"""


def wait_until(condition, what, seconds=LIMIT_S):
    """Return the first true value of *condition*; fail with *what* when there is none in time."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= deadline:
            told = what() if callable(what) else what
            raise AssertionError(f"not within {seconds} s: {told}")
        pause.wait(0.05)


@dataclass
class Node:
    """One node: its machine, made of files, and the environment of its hooks."""

    name: str
    home: Path
    mock: object
    root: FakeRoot = None
    env: dict = field(default_factory=dict)

    def reset(self, store):
        """Make it healthy and without a past."""
        for name in ("root", "state", "spool", "path"):
            shutil.rmtree(self.home / name, ignore_errors=True)
        (self.home / "health").unlink(missing_ok=True)
        self.root = FakeRoot(self.home / "root")
        for address, uuid in zip(addresses(GPUS), UUIDS, strict=True):
            self.root.gpu(address)
            file = f"proc/driver/nvidia/gpus/{address}/information"
            self.root.write(file, f"GPU UUID: \t {uuid}\n")
        self.env = {
            "GPUOPS_ROOT": str(self.root.path),
            "GPUOPS_STATE": str(self.home / "state"),
            "GPUOPS_SPOOL": str(self.home / "spool"),
            "GPUOPS_STORE": store,
            "GPUOPS_MODE": "enforce",
            # Busy cores: no limit of time is what is tried here.
            "GPUOPS_PERMIT_DEADLINE_S": "30",
            "PYTHONPATH": str(self.home.parent.parent / "install"),
        }
        self.reset_nvml()

    def nvml(self, scenario):
        """Have NVML answer by *scenario* from now on."""
        self.set(**self.mock.env(scenario))

    def set(self, **env):
        """Change the environment of this node's hooks."""
        self.env |= env
        text = "".join(f"export {name}='{value}'\n" for name, value in self.env.items())
        partial = self.home / "env.partial"
        partial.write_text(text)
        partial.replace(self.home / "env")

    def write_env(self, text):
        """Put *text*, which may be nonsense, in the place of this node's environment."""
        (self.home / "env").write_text(text)

    def reset_nvml(self):
        """Have NVML find every GPU well again."""
        self.nvml(shape("h100", GPUS))

    def lose_gpu(self, index=2):
        """Have NVML say that a GPU is lost: the driver's own verdict."""
        self.nvml(shape("h100", GPUS, broken={index: 15}))

    def lack_gpus(self):
        """Have fewer GPUs than somebody expects: a verdict by a limit of ours."""
        self.set(GPUOPS_GPUS_EXPECTED=str(GPUS + 1))

    def xid(self, code, index=0):
        """Write an Xid of one GPU into the kernel's log."""
        address = addresses(GPUS)[index].rpartition(".")[0]
        self.root.kmsg(f"NVRM: Xid (PCI:{address}): {code}, pid=1, name=python, of a test.")

    def checks_health(self):
        """Let slurmd's health checks of this node run from now on."""
        (self.home / "health").touch()

    def use_scontrol(self, script):
        """Have the hooks of this node call *script* in place of scontrol."""
        program = self.home / "path" / "scontrol"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        self.set(GPUOPS_SLURM_BIN_DIR=str(program.parent))

    def drain_record(self):
        """Return the drain that this node records as its own, None where there is none."""
        # It may be removed at any moment.
        with contextlib.suppress(FileNotFoundError):
            return json.loads((self.home / "state" / "drain.json").read_text())
        return None


# Jobs resolve the names of nodes, which are all this machine.
IN_MOUNTS = ("--mount", "--propagation", "slave", "sh", "-c")
IN_MOUNTS += ('mount --bind "$0" /etc/hosts && exec "$@"',)


class Cluster:
    """The daemons and what a user and an administrator type."""

    def __init__(self, home, mock, names=NODES):
        self.home = home
        self.guard = self._guard()
        self.processes = []
        self.nodes = {}
        for name in names:
            (home / "nodes" / name).mkdir(parents=True)
            self.nodes[name] = Node(name, home / "nodes" / name, mock)
        self.env = {**os.environ, "SLURM_CONF": str(home / "slurm.conf")}

    def __getitem__(self, name):
        return self.nodes[name]

    def install_hooks(self):
        """Copy the shipped hooks with this site's paths, and give them their environment."""
        hooks = self.home / "hooks"
        hooks.mkdir(exist_ok=True)
        patient_install(self.home / "install")
        paths = {
            "/opt/gpuops/bin/gpuops": str(self.home / "gpuops"),
            "/etc/gpuops/hook.env": str(self.home / "hook.env"),
            "/run/gpuops": str(self.home / "verdicts"),
        }
        for name in HOOKS:
            text = (SHIPPED / name).read_text()
            for shipped, ours in paths.items():
                assert shipped in text or name == "health_check.sh"
                text = text.replace(shipped, ours)
            text, count = re.subn(
                r"^LIMIT_S=\d+$", f"LIMIT_S={HOOK_LIMIT_S}", text, flags=re.MULTILINE
            )
            assert count == 1
            if name == "health_check.sh":
                text = text.replace("slurm health", "slurm health --jitter 0")
            (hooks / name).write_text(text)
            (hooks / name).chmod(0o755)
        (self.home / "hook.env").write_text(HOOK_ENV.format(home=self.home))
        (self.home / "gpuops").write_text(f'#!/bin/sh\nexec {sys.executable} -m gpuops "$@"\n')
        (self.home / "gpuops").chmod(0o755)

    def configure(self):
        """Write the configuration with ports that are free now."""
        ports = free_ports(len(self.nodes) + 1)
        lines = [
            f"NodeName={name} NodeHostname=localhost Port={port} CPUs=4 RealMemory=1000"
            f" Gres=gpu:{GPUS}"
            for name, port in zip(self.nodes, ports[1:], strict=True)
        ]
        conf = CONF.format(home=self.home, ctld_port=ports[0], nodes="\n".join(lines))
        (self.home / "slurm.conf").write_text(conf)
        files = ""
        for name in self.nodes:
            first = SHIFTED_BY if name == SHIFTED else 0
            devices = gpu_devices(self.home / "dev", range(first, first + GPUS))
            files += "".join(f"NodeName={name} Name=gpu File={path}\n" for path in devices)
        (self.home / "gres.conf").write_text(files)
        hosts = f"{Path('/etc/hosts').read_text()}\n127.0.0.1 {' '.join(self.nodes)}\n"
        (self.home / "hosts").write_text(hosts)

    def start(self):
        """Start all daemons and return when every node is idle."""
        for name in ("state", "slurmd", *(f"slurmd/{name}" for name in self.nodes)):
            (self.home / name).mkdir(exist_ok=True)
        self.start_controller(clean=True)
        for name in self.nodes:
            self._spawn("unshare", *IN_MOUNTS, str(self.home / "hosts"), "slurmd", "-D", "-N", name)
        wait_until(self._all_idle, self._trouble, START_S)

    def start_controller(self, *, clean=False):
        self.controller = self._spawn("slurmctld", "-D", *(["-i", "-c"] if clean else []))

    def stop_controller(self):
        self.controller.send_signal(signal.SIGTERM)
        self.controller.wait(timeout=60)
        self.processes.remove(self.controller)

    def _all_idle(self):
        if any(process.poll() is not None for process in self.processes):
            raise RuntimeError(f"a daemon ended: {self._trouble()}")
        shown = self._run("sinfo", "-h", "-N", "-o", "%N %T", check=False).stdout.split("\n")
        return sum(line.endswith(" idle") for line in shown) == len(self.nodes)

    def _trouble(self):
        logs = [self.home / "slurmctld.log", self.home / "n1.log"]
        shown = self._run("sinfo", "-N", "-o", "%N %T %E", check=False).stdout
        return shown + "".join(log.read_text()[-1000:] for log in logs if log.exists())

    def _spawn(self, *argv):
        log = (self.home / "daemons.log").open("ab")
        with log:
            process = subprocess.Popen(
                argv,
                # A hook that crashes on purpose leaves its core file there.
                cwd=self.home,
                env={"PATH": os.environ["PATH"], "SLURM_CONF": self.env["SLURM_CONF"]},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def _run(self, *argv, check=True):
        return subprocess.run(
            argv, env=self.env, capture_output=True, text=True, timeout=30, check=check
        )

    def scontrol(self, *argv):
        """Return what scontrol prints."""
        return self._run("scontrol", *argv).stdout

    def drain(self, name, reason):
        """Drain a node as an administrator does."""
        self.scontrol("update", f"NodeName={name}", "State=DRAIN", f"Reason={reason}")

    def state(self, name):
        """Return a node's state and reason, as ``("IDLE+DRAIN", "Prolog error")``."""
        text = self.scontrol("show", "node", name)
        reason = re.search(r"Reason=(.*) \[.*\]$", text, re.MULTILINE)
        return re.search(r"State=(\S+)", text)[1], reason and reason[1]

    def submit(self, script="exit 0", *options):
        """Submit a batch job of *script*; return its id."""
        path = self.home / f"job-{secrets.token_hex(4)}.sh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        out = ("-o", str(self.home / "job-%j.out"))
        done = self._run("sbatch", "--parsable", *out, *options, str(path))
        return done.stdout.strip()

    def job(self, job_id):
        """Return the fields of a job."""
        text = self.scontrol("show", "job", job_id)
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def finished(self, job_id, seconds=LIMIT_S):
        """Return a job's fields when it has ended."""
        ends = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}

        def ended():
            fields = self.job(job_id)
            return fields if fields["JobState"] in ends else None

        return wait_until(ended, lambda: self.job(job_id), seconds)

    def drained_for(self, name, wanted, seconds=LIMIT_S):
        """Return a node's reason when it is drained and its reason holds *wanted*."""

        def found():
            state, reason = self.state(name)
            return reason if "DRAIN" in state and wanted in (reason or "") else None

        return wait_until(found, lambda: (self.state(name), self._tail(name)), seconds)

    def in_use(self, name, seconds=LIMIT_S):
        """Return when a node is neither drained nor down."""
        wait_until(
            lambda: self.state(name)[0].rstrip("*") in {"IDLE", "MIXED", "ALLOCATED"},
            lambda: (self.state(name), self._tail(name)),
            seconds,
        )

    def _tail(self, name):
        log = self.home / f"{name}.log"
        return log.read_text(errors="replace")[-3000:] if log.exists() else ""

    def log_of(self, name):
        """Return what slurmd of a node has logged, the output of its hooks among it."""
        return self._tail(name)

    def run_hook(self, name, hook="prolog", **env):
        """Run a node's hook as slurmd does, without a job; return what came of it."""
        return subprocess.run(
            [str(self.home / "hooks" / f"{hook}.sh")],
            check=False,
            env={"SLURMD_NODENAME": name, "SLURM_JOB_ID": "4242", **env},
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=2 * HOOK_LIMIT_S,
            start_new_session=True,
        )

    def reset(self, store):
        """End every job, take back every drain, make every node healthy."""
        for node in self.nodes.values():
            (node.home / "health").unlink(missing_ok=True)
            # The epilog of a job that is cancelled now would wait for a driver that hangs.
            node.reset_nvml()
        self._run("scancel", "--user=root", check=False)
        wait_until(lambda: not self._run("squeue", "-h").stdout.strip(), self._trouble, 60)
        # What our hooks left running in an earlier test would go on in this one.
        end_all(lambda: processes_of(self.home, b"gpuops"))
        for node in self.nodes.values():
            node.reset(store)
        for name in self.nodes:
            if "DRAIN" in self.state(name)[0] or "DOWN" in self.state(name)[0]:
                self.scontrol("update", f"NodeName={name}", "State=RESUME")
        wait_until(self._all_idle, self._trouble)

    def stop(self):
        """End every daemon and its children, the jobs and the hooks' helpers; remove everything."""
        for process in reversed(self.processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=60)
        end_all(lambda: processes_of(self.home))
        shutil.rmtree(self.home)
        self.guard.stdin.close()
        self.guard.wait(timeout=10)

    def _guard(self):
        """Return a process that ends all of this when the test session ends without doing so."""
        return subprocess.Popen(
            [sys.executable, slurm_processes.__file__, str(self.home)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )


def gpu_devices(folder, numbers):
    """Return device files, which Slurm wants for GPUs; any character device will do."""
    folder.mkdir(exist_ok=True)
    found = []
    for number in numbers:
        path = folder / f"gpu{number}"
        if not path.exists():
            os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        found.append(path)
    return found


def start_munge(cluster):
    """Start a munged with a key and a socket of its own, as the user that Debian gives it."""
    user = pwd.getpwnam("munge")
    for name in ("munge", "socket"):
        folder = cluster.home / name
        folder.mkdir()
        os.chown(folder, user.pw_uid, user.pw_gid)
    (cluster.home / "munge").chmod(0o700)
    key = cluster.home / "munge" / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    os.chown(key, user.pw_uid, user.pw_gid)
    command = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    command += ["munged", "--foreground", f"--key-file={key}", "--num-threads=2"]
    command += [
        f"--socket={cluster.home}/socket/munge",
        f"--pid-file={cluster.home}/socket/pid",
    ]
    command += [
        f"--log-file={cluster.home}/munge/log",
        f"--seed-file={cluster.home}/munge/seed",
    ]
    cluster._spawn(*command)
    wait_until((cluster.home / "socket" / "munge").exists, "munged has no socket")


@contextlib.contextmanager
def running_cluster(mock, names=NODES):
    """Yield a cluster of *names* for the time of a test session; skip where there can be none."""
    programs = ("slurmctld", "slurmd", "scontrol", "sbatch", "munged", "setpriv")
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        unavailable(f"not installed: {', '.join(missing)} (Debian: slurm-wlm munge)")
    if os.geteuid() != 0:
        unavailable("slurmd needs root")
    for attempt in range(_TRIES):
        # Not below pytest's own: munged looks at every parent, and paths of sockets are short.
        home = quick_home("gpuops-slurm-")
        home.chmod(0o755)
        cluster = Cluster(home, mock, names)
        try:
            for node in cluster.nodes.values():
                node.reset("sqlite:////proc/nonexistent/gpuops.db")
            cluster.install_hooks()
            cluster.configure()
            start_munge(cluster)
            cluster.start()
            break
        except BaseException as exc:
            cluster.stop()
            # Another test may have taken a port in between.
            if attempt == _TRIES - 1 or not isinstance(exc, RuntimeError):
                raise
    try:
        yield cluster
    finally:
        cluster.stop()
