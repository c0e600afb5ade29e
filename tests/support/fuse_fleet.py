"""A fleet whose nodes fail as planned, and the gate's own policy deciding about each of them.

Simulated are time, the fleet, Slurm (a job starts on a node now and then) and the store's tables;
the store is silent when the plan says so. Who is drained is decided by `gpuops.gate.policy` and
`gpuops.store.fuse`. `MemoryPermits` counts as `gpuops.store.permits` does; a test compares them.
"""

import heapq
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field, replace

from gpuops.config.resolve import GateMode
from gpuops.gate.policy import FleetView, PermitReply, decide_drain, find_drain_causes
from gpuops.host.node_state import FleetCount
from gpuops.model import ActionKind, Entity, EntityKind, FailureClass, Finding, Status
from gpuops.store.fuse import HELD_S, CauseKind, FuseCounts, FuseSettings, may_drain

TICK_S = 300  # HealthCheckInterval of slurm/README.md
DAY_S = 86_400
YEAR_S = 365 * DAY_S
JOB_EVERY_S = 4 * 3600
BACK_S = 2 * TICK_S
# arXiv 2410.21680: 6.50 failures in 1000 node-days.
FAILURES_PER_NODE_DAY = 0.0065
_ACTIONS = dict.fromkeys(FailureClass, ActionKind.DRAIN)
_NODE = Entity(EntityKind.NODE, "n")


def fault(check, failure_class, *, hardware=False, shared=False):
    """Return what *check* finds on a node that fails so."""
    return Finding(
        check=check,
        entity=_NODE,
        status=Status.FAIL,
        message="planted",
        failure_class=failure_class,
        hardware_reported=hardware,
        shared_cause=shared,
    )


XID = fault("gpu_xid", FailureClass.GPU_FELL_OFF_BUS, hardware=True)
ECC = fault("gpu_ecc", FailureClass.GPU_ECC_UNCORRECTABLE, hardware=True)
DIMM = fault("edac", FailureClass.HOST_DIMM, hardware=True)
DRIVER = fault("gpu_driver", FailureClass.GPU_DRIVER, hardware=True)
COUNT = fault("gpu_count", FailureClass.GPU_MISSING)
LINK = fault("gpu_pcie_link", FailureClass.HOST_PCIE)
PORT = fault("ib_ports", FailureClass.NETWORK_PORT, shared=True)
MOUNT = fault("mount_alive", FailureClass.STORAGE_SHARED_FS, shared=True)
WRITE = fault("mount_writable", FailureClass.STORAGE_SHARED_FS, shared=True)
PROFILE = fault("memory_size", FailureClass.HOST_DIMM)
# A judgement: most failures of GPU nodes are of GPUs and memory, few of links (ibid., by cause).
SINGLE = ((XID, 40), (ECC, 20), (DIMM, 5), (COUNT, 10), (LINK, 10), (PORT, 15))


class MemoryPermits:
    """The permits of one cluster, as the store has them; nothing is searched."""

    def __init__(self, seen, settings):
        self.seen, self.settings = seen, settings
        self.held, self.asked, self.of_node = {}, {}, Counter()

    def request(self, node, requests, now_s):
        """Return which of *requests* (check and kind) are granted, up to the first."""
        replies = []
        for n, (check, kind) in enumerate(requests):
            refused = {kind for _, kind in requests[:n]}
            replies.append(self._decide(node, check, kind, refused, now_s))
            if replies[-1]:
                break
        return replies

    def _decide(self, node, check, kind, refused, now_s):
        held, asked = self.held.setdefault(check, {}), self.asked.setdefault(check, {})
        for old in _older(held, now_s - HELD_S):
            self._let_go(held, old)
        for old in _older(asked, now_s - self.settings.window_s):
            del asked[old]
        if node in held:
            return True
        asked.pop(node, None)
        counts = FuseCounts(
            seen=self.seen,
            failing=len(held) + len(asked) + 1,
            drained=self.drained - (node in self.of_node),
        )
        granted = may_drain(kind, counts, self.settings, refused)
        (held if granted else asked)[node] = now_s
        if granted:
            self.of_node[node] += 1
        return granted

    @property
    def drained(self):
        return len(self.of_node)

    def release(self, node):
        for held in self.held.values():
            if node in held:
                self._let_go(held, node)

    def _let_go(self, held, node):
        del held[node]
        self.of_node[node] -= 1
        if not self.of_node[node]:
            del self.of_node[node]


def _older(times, than_s):
    """Return those of *times*, the oldest of which is first, that are too old."""
    return [name for name, _ in itertools.takewhile(lambda item: item[1] <= than_s, times.items())]


class ByTable:
    """The rule of `gpuops.gate.policy`."""

    def __init__(self, n_nodes):
        self.settings = FuseSettings()
        self.permits = MemoryPermits(n_nodes, self.settings)
        self.count = None
        self.cap = self.settings.cap(n_nodes)

    def drains(self, node, findings, now_s, *, is_silent):
        causes = find_drain_causes(findings, _ACTIONS)
        if is_silent:
            replies = [PermitReply(None, "silent")]
        else:
            requests = [(cause.finding.check, cause.kind) for cause in causes]
            granted = self.permits.request(node, requests, now_s)
            replies = [PermitReply(item, "") for item in granted]
        view = FleetView(settings=self.settings, count=self.count, now_us=round(now_s * 1e6))
        return decide_drain(causes, GateMode.ENFORCE, replies, view)[1].drains

    def health_checks(self, now_s):
        """Have every node cache the fleet's count, while the store answers."""
        self.count = FleetCount(
            t_us=round(now_s * 1e6), seen=self.permits.seen, drained=self.permits.drained
        )

    def back(self, node):
        self.permits.release(node)


class NoFuse:
    """Every failure drains."""

    def __init__(self, _n_nodes):
        pass

    def drains(self, _node, _findings, _now_s, *, is_silent):
        del is_silent
        return True

    def health_checks(self, now_s):
        pass

    def back(self, node):
        pass


class ThirdNode(NoFuse):
    """The rule before: the third node within ten minutes is refused, whatever it fails by."""

    LISTED = frozenset(
        {
            FailureClass.GPU_FELL_OFF_BUS,
            FailureClass.GPU_ECC_UNCORRECTABLE,
            FailureClass.HOST_DIMM,
        }
    )

    def __init__(self, _n_nodes):
        self.asked, self.granted = {}, set()

    def drains(self, node, findings, now_s, *, is_silent):
        first = min(findings, key=lambda item: item.failure_class not in self.LISTED)
        if is_silent:
            return first.failure_class in self.LISTED
        asked = self.asked.setdefault(first.check, {})
        for old in _older(asked, now_s - 600):
            del asked[old]
            self.granted.discard((first.check, old))
        asked.pop(node, None)
        if (first.check, node) in self.granted or len(asked) + 1 < 3:
            self.granted.add((first.check, node))
        asked[node] = now_s
        return (first.check, node) in self.granted


@dataclass(kw_only=True, eq=False)
class Planted:
    """A fault of *nodes* from one time to another; ``end_s`` None: until repaired after a drain."""

    name: str
    findings: tuple
    nodes: tuple
    start_s: float
    end_s: float | None = None
    spread_s: float = 0.0
    is_rule: bool = False
    repair_s: float = DAY_S


@dataclass
class Tally:
    """What became of the nodes: jobs started, by the kind of the fault; nodes drained."""

    jobs: Counter = field(default_factory=Counter)
    drained: Counter = field(default_factory=Counter)
    by_storm: dict = field(default_factory=dict)


class Fleet:
    """Runs a plan under a rule; *silent*: from when to when the store does not answer."""

    def __init__(self, rule, n_nodes, plan, silent, seed):
        self.rule, self.n_nodes, self.silent = rule, n_nodes, silent
        self.random, self.tally = random.Random(seed), Tally()
        self.faults, self.drained, self.queue, self.n = {}, {}, [], itertools.count()
        for planted in plan:
            for k, node in enumerate(planted.nodes):
                start_s = planted.start_s + planted.spread_s * k / len(planted.nodes)
                self._at(start_s, self._begin, node, planted)
        for start_s, _ in silent:
            self._at(start_s - 1, rule.health_checks)

    def _at(self, t_s, do, *args):
        heapq.heappush(self.queue, (t_s, next(self.n), do, args))

    def _begin(self, t_s, node, planted):
        self.faults.setdefault(node, []).append(planted)
        if planted.end_s is not None:
            self._at(max(planted.end_s, t_s + 1), self._end, node, planted)
        elif node in self.drained:
            self._repair(t_s, node, planted)

    def _repair(self, t_s, node, planted):
        repaired_s = t_s + self.random.expovariate(1 / planted.repair_s)
        self._at(repaired_s, self._end, node, planted)

    def _end(self, t_s, node, planted):
        if planted in self.faults.get(node, ()):
            self.faults[node].remove(planted)
        if not self.faults.get(node):
            self.faults.pop(node, None)
            if node in self.drained:
                self._at(t_s + BACK_S, self._return, node)

    def _return(self, _t_s, node):
        if node not in self.faults and self.drained.pop(node, None) is not None:
            self.rule.back(node)

    def run(self, until_s):
        now_s = 0.0
        while now_s < until_s:
            while self.queue and self.queue[0][0] <= now_s:
                t_s, _, do, args = heapq.heappop(self.queue)
                do(t_s, *args)
            self._tick(now_s)
            awake = any(node not in self.drained for node in self.faults)
            ahead_s = self.queue[0][0] if self.queue else until_s
            now_s += TICK_S if awake else max(TICK_S, ahead_s - now_s)
        return self.tally

    def _tick(self, now_s):
        is_silent = any(start_s <= now_s < end_s for start_s, end_s in self.silent)
        if not is_silent:
            self.rule.health_checks(now_s)
        failing = [node for node in self.faults if node not in self.drained]
        self.random.shuffle(failing)
        for node in failing:
            self._check(node, now_s, is_silent=is_silent)

    def _check(self, node, now_s, *, is_silent):
        planted = self.faults[node]
        findings = [finding for item in planted for finding in item.findings]
        if self.rule.drains(node, findings, now_s, is_silent=is_silent):
            self._drain(node, planted, now_s)
        elif self.random.random() < TICK_S / JOB_EVERY_S:
            self._start_job(planted)

    def _drain(self, node, planted, now_s):
        is_healthy = all(item.is_rule for item in planted)
        self.drained[node] = is_healthy
        word = "healthy" if is_healthy else "broken"
        self.tally.drained[word] += 1
        for item in planted:
            self.tally.by_storm.setdefault(item.name, Counter())[word] += 1
            if item.end_s is None:
                self._repair(now_s, node, item)

    def _start_job(self, planted):
        broken = [item for item in planted if not item.is_rule]
        if not broken:
            return  # the node is well; only the rule is wrong
        kinds = {CauseKind.of(finding) for item in broken for finding in item.findings}
        word = next(kind.value for kind in CauseKind if kind in kinds)
        if word == CauseKind.HARDWARE:
            cap = FuseSettings().cap(self.n_nodes)
            word += "_below_cap" if len(self.drained) < cap else "_above_cap"
        self.tally.jobs[word] += 1
        for item in broken:
            self.tally.by_storm.setdefault(item.name, Counter())["jobs"] += 1


def single_faults(n_nodes, until_s, rng):
    """Return the single faults of a fleet, at random times on random nodes."""
    found, t_s = [], 0.0
    kinds, weights = zip(*SINGLE, strict=True)
    while True:
        t_s += rng.expovariate(n_nodes * FAILURES_PER_NODE_DAY / DAY_S)
        if t_s >= until_s:
            return found
        finding = rng.choices(kinds, weights)[0]
        node = rng.randrange(n_nodes)
        found.append(Planted(name="single", findings=(finding,), nodes=(node,), start_s=t_s))


def storms(n_nodes, start_s, apart_s, rng):
    """Return the storms of a fleet, one after the other."""
    everyone = tuple(rng.sample(range(n_nodes), n_nodes))
    hour_s = 3600
    row, leaf = (everyone[: max(5, int(n_nodes * share))] for share in (0.03, 0.032))
    shapes = [
        ("row of racks overheats", (XID,), row, 600, 8 * hour_s, {}),
        ("leaf switch", (PORT,), leaf, 0, 6 * hour_s, {}),
        ("file server", (MOUNT, WRITE), everyone, 0, 2 * hour_s, {}),
        ("bad driver", (DRIVER, COUNT), everyone, hour_s, 8 * hour_s, {}),
        ("wrong rule", (PROFILE,), everyone, 0, 12 * hour_s, {"is_rule": True}),
        ("slow wrong rule", (LINK,), everyone, 3 * DAY_S, 3 * DAY_S, {"is_rule": True}),
    ]
    plan = []
    for n, (name, findings, nodes, spread_s, lasts_s, more) in enumerate(shapes):
        at_s = start_s + n * apart_s
        plan.append(
            Planted(
                name=name,
                findings=findings,
                nodes=nodes,
                start_s=at_s,
                end_s=at_s + lasts_s,
                spread_s=spread_s,
                **more,
            )
        )
    return plan


RULES = {"by the table": ByTable, "the third node": ThirdNode, "no fuse": NoFuse}


def simulate(rule, *, n_nodes, apart_s, seed):
    """Return what became of a fleet under *rule*: every storm, and each again with a silent store.

    The storms are *apart_s* apart, and single faults happen all the time.
    """
    rng = random.Random(seed)
    answered = storms(n_nodes, apart_s, apart_s, rng)
    first_s = apart_s * (len(answered) + 1)
    silent = [
        replace(planted, name=f"{planted.name}, store silent")
        for planted in storms(n_nodes, first_s, apart_s, rng)
    ]
    until_s = apart_s * (2 * len(answered) + 1)
    plan = [*single_faults(n_nodes, until_s, rng), *answered, *silent]
    outages = [(planted.start_s - 60, planted.end_s) for planted in silent]
    return Fleet(RULES[rule](n_nodes), n_nodes, plan, outages, seed).run(until_s)
