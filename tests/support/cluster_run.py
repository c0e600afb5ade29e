"""One ``gpuops run`` over several hosts: an agent on each, one shared job folder, all watched."""

import json
import sys
from contextlib import suppress
from pathlib import Path

from gpuops.errors import EXIT_REQUEUE
from support.ledger import in_one_row, problems, read_lines
from support.ports import free_port
from support.runs import JOBS, is_alive, wait_until, whole_lines

LIMIT_S = 120.0
# Each host has a state directory of its own, so a token that one makes is not that of the others.
TOKEN = "4f" * 16


class Agent:
    """One started agent and what it wrote to the console."""

    def __init__(self, host, number, process, out):
        self.host, self.number, self.process, self.out = host, number, process, out

    @property
    def code(self):
        """Return its exit code, None while it runs."""
        return self.process.poll()

    def said(self):
        """Return what it and its workers wrote to the console."""
        return self.out.read_text(errors="replace")


def _without_quorum(flags):
    """Return *flags* with one --rdzv-conf, which turns the quorum off unless it asks for one."""
    conf = "--rdzv-conf="
    values = [flag.removeprefix(conf) for flag in flags if str(flag).startswith(conf)]
    others = [flag for flag in flags if not str(flag).startswith(conf)]
    return [*others, conf + ",".join(["quorum=0", *values])]


class ClusterRun:
    """A run of *script* on *hosts*; nothing starts before `start`.

    The endpoint's server holds the record, unless *quorum*: then three or five nodes do, where they
    can.

    *endpoint* is that of the rendezvous: an address and port, or the URL of a Postgres store that
    the hosts reach. Left out, it is the first host's. *env* goes to every agent.
    """

    def __init__(  # the many ways to start a run
        self,
        hosts,
        folder,
        *flags,
        script="elastic_train.py",
        args=(),
        nnodes=None,
        nproc=1,
        endpoint=None,
        run_id="job",
        env=None,
        quorum=False,
    ):
        self.hosts, self.folder = hosts, Path(folder)
        self.job = self.folder / "job"
        self.job.mkdir(parents=True, exist_ok=True)
        self.endpoint = endpoint or f"{hosts[0].address}:{free_port(hosts[0].address)}"
        self.flags = [
            f"--nnodes={nnodes or len(hosts)}",
            f"--nproc-per-node={nproc}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.endpoint}",
            f"--rdzv-id={run_id}",
            *(flags if quorum else _without_quorum(flags)),
        ]
        self.script, self.args = JOBS / script, args
        self.env = {"JOB_DIR": str(self.job), "GPUOPS_TOKEN": TOKEN, **(env or {})}
        self.agents = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for host in self.hosts:
            host.kill_all()

    def start(self, *hosts, env=None, flags=()):
        """Start an agent on each of *hosts*, on all of them where none is named; return them."""
        started = []
        for host in hosts or self.hosts:
            number = sum(agent.host is host for agent in self.agents)
            host.folder.mkdir(parents=True, exist_ok=True)
            out = host.folder / f"console-{number}"
            with out.open("w") as stream:
                process = host.popen(
                    [*self.command(host, flags), self.script, *self.args],
                    env={**self.env, **(env or {})},
                    stdout=stream,
                    stderr=stream,
                    stdin=-3,  # subprocess.DEVNULL
                )
            started.append(Agent(host, number, process, out))
        self.agents += started
        return started

    def requeue(self):
        """Start an agent again wherever one has ended with 85; return these hosts."""
        ended = [host for host in self.hosts if self.agent(host).code == EXIT_REQUEUE]
        if ended:
            self.start(*ended)
        return ended

    def command(self, host, flags):
        """Return the launcher's command line on *host*, as far as the script."""
        words = ["--local-addr", host.address] if host.namespace else []
        return [sys.executable, "-m", "gpuops", "run", *self.flags, *words, *flags]

    def agent(self, host):
        """Return the newest agent of *host*."""
        return next(agent for agent in reversed(self.agents) if agent.host is host)

    def said(self):
        """Return what all agents wrote, for the message of a failed test."""
        return "\n".join(
            f"--- {agent.host.name} ({agent.number}), exit {agent.code}\n{agent.said()[-6000:]}"
            for agent in self.agents
        )

    def folders(self, host):
        """Return the folders of runs on *host*, oldest first."""
        return sorted(host.runs.glob("*"))

    def state(self, host):
        """Return what the newest run of *host* publishes, None before there is something.

        Each rank of a node has a file of its own, and that of an earlier rank stays.
        """
        for folder in reversed(self.folders(host)):
            newest_first = sorted(folder.glob("state*.json"), key=_written_ns, reverse=True)
            for path in newest_first:
                state = json.loads(path.read_text())
                if state["node"] == host.name:
                    return state
        return None

    def lines(self):
        """Return what the job wrote down."""
        return read_lines(self.job / "steps")

    def wait(self, condition, what, limit_s=LIMIT_S):
        """Return the first true value of *condition*; fail with all consoles after *limit_s*."""

        def look():
            are_over = all(agent.code is not None for agent in self.agents)
            found = condition()
            assert found or not are_over, f"every agent has ended before {what}"
            return found

        try:
            return wait_until(look, limit_s, what)
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.said()}\n{self.lines()[-20:]}") from None

    def wait_for_step(self, step, generation=None, limit_s=LIMIT_S):
        """Wait until some rank has made *step*, in *generation* or any; return the line."""

        def look():
            for line in self.lines():
                fits = generation is None or line.generation >= generation
                if line.what == "step" and fits and line.number >= step:
                    return line
            return None

        where = "any" if generation is None else f"generation {generation}"
        return self.wait(look, f"step {step} of {where}", limit_s)

    def wait_for_generation(self, generation, limit_s=LIMIT_S):
        """Wait until a rank has made a step in *generation* or a later one; return the line."""
        return self.wait_for_step(0, generation, limit_s)

    def worker_pids(self, host=None):
        """Return every worker of the run, or of *host*, that has written a line, living or not."""
        pids = {line.pid for line in self.lines()}
        return pids if host is None else pids & set(host.pids())

    def orphans(self):
        """Return the workers that live on; a number may be another process's by now."""
        return {pid for pid in self.worker_pids() if is_alive(pid) and self.is_worker(pid)}

    def is_worker(self, pid):
        """Say whether *pid* is a worker of this run, and not whoever has its number by now.

        Threads have numbers, too, and a signal to one is a signal to its process.
        """
        with suppress(OSError):
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            is_ours = f"JOB_DIR={self.job}".encode() in words
            return is_ours and any(word.startswith(b"RANK=") for word in words)
        return False

    def events(self, kind=None, host=None):
        """Return the events in all journals, oldest first, once each."""
        found = {}
        for each in self.hosts if host is None else [host]:
            for path in sorted(each.runs.glob("*/journal/*")):
                for line in whole_lines(path):
                    event = json.loads(line)["event"]
                    found[event["id"]] = event
        return [found[key] for key in sorted(found) if kind in {None, found[key]["kind"]}]

    def incidents(self):
        """Return the newest snapshot of each incident, oldest first."""
        newest = {}
        for event in self.events("incident.recorded"):
            incident = event["payload"]
            known = newest.get(incident["id"], incident)
            newest[incident["id"]] = max(known, incident, key=_weight)
        return list(newest.values())

    def incident(self, failure_class, limit_s=20):
        """Return the newest incident of *failure_class*; fail with those that there are."""

        def look():
            found = [i for i in self.incidents() if i["failure_class"] == failure_class]
            return found[-1] if found else None

        try:
            return wait_until(look, limit_s, failure_class)
        except AssertionError:
            there = [(i["failure_class"], i["title"]) for i in self.incidents()]
            raise AssertionError(f"no {failure_class}; there are {there}\n{self.said()}") from None

    def decisions(self):
        """Return the payloads of the decisions, oldest first."""
        return [event["payload"] for event in self.events("decision.made")]

    def seconds_to_generation(self, generation, since_ns, limit_s=LIMIT_S):
        """Return the time from *since_ns* to the first step in *generation* or a later one."""
        self.wait_for_generation(generation, limit_s)
        steps = [x for x in self.lines() if x.what == "step" and x.generation >= generation]
        return (min(line.mono_ns for line in steps) - since_ns) / 1e9

    def finish(self, *hosts, limit_s=LIMIT_S):
        """Wait for the agents of *hosts* (all); return their exit codes by node."""
        agents = [self.agent(host) for host in (hosts or self.hosts)]
        self.wait(lambda: all(agent.code is not None for agent in agents), "the end", limit_s)
        return {agent.host.name: agent.code for agent in agents}

    def enough(self):
        """Let the job end with its next step, however many it was to make."""
        (self.job / "enough").touch()

    def check_ledger(self, steps=None):
        """Fail unless every step was trained once, or redone from a recorded point.

        *steps* is how many there were to be; None: as many as the last generation came to.
        """
        lines = in_one_row(self.lines())
        newest = max((line.generation for line in lines if line.what == "step"), default=0)
        # One that was told that it is enough may end before an earlier one had.
        made = (x.number for x in lines if x.what == "step" and x.generation == newest)
        last = max(made, default=0)
        found = problems(lines, last if steps is None else steps)
        assert not found, f"{found}\n{self.said()}"
        assert self.orphans() == set()

    def drill(self, host, scenario, *options, timeout=120):
        """Run ``gpuops drill SCENARIO`` on *host*; fail where it could not be done."""
        done = host.gpuops(
            *("drill", scenario, "--run-dir", host.runs, "--yes", *map(str, options)),
            timeout=timeout,
        )
        assert done.returncode == 0, done.stderr + self.said()
        return done


def _written_ns(path):
    return path.stat().st_mtime_ns


def _weight(incident):
    """Order accounts of one incident as the store does: who knows more, then who spoke last."""
    return incident["authority"], incident["rev"]


def postgres_endpoint(url, address):
    """Return *url* (of a server on this machine) as hosts reach it through *address*."""
    return url.replace("127.0.0.1", address)
