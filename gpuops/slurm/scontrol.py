"""Read and change the state of a node in slurmctld: `scontrol` with a timeout.

Source: scontrol(1), "show node" and "update"; slurm.conf(5), "NODE STATES".
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gpuops.errors import ProbeError, SlurmError
from gpuops.host.process.command import BYTES_MAX, CommandAnswer, ask, find
from gpuops.units import US_PER_S

# Where sites install Slurm outside the usual folders; a hook has no PATH.
_PLACES = ("scontrol", "/opt/slurm/bin/scontrol", "/usr/local/slurm/bin/scontrol")
TIMEOUT_S = 4.0
# All nodes of a cluster, about 1 kB each.
CLUSTER_TIMEOUT_S = 30.0
CLUSTER_BYTES_MAX = 64 * 2**20
_PASSED_ON = ("SLURM_CONF", "SLURM_CONF_SERVER")
# `State=IDLE*+DRAIN`: the characters after a state are flags.
_SIGNS = "*~#!%$@^-"
_STATE = re.compile(r"^ *State=(\S+)", re.MULTILINE)
_REASON = re.compile(r"^ *Reason=(.*)$", re.MULTILINE)
_WHO = re.compile(r"(?P<text>.*) \[(?P<user>[^\[\]@]+)@(?P<time>[^\[\]@]+)\]")
# Further lines of a reason are indented, so that none begins like a node.
_RECORD = re.compile(r"^NodeName=(\S+)", re.MULTILINE)
# Such a node is only configured, or slurmctld has given it up.
_ABSENT = frozenset(
    {"UNKNOWN", "FUTURE", "NOT_RESPONDING", "INVALID", "INVALID_REG", "POWERED_DOWN"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNode:
    """One node as slurmctld sees it.

    ``reason_by``: the user who set the reason, at ``reason_us``; None: slurmctld does not say.
    """

    name: str
    states: frozenset[str]
    reason: str | None = None
    reason_by: str | None = None
    reason_us: int | None = None

    @property
    def drained(self) -> bool:
        """Return whether no new job may start there: drained, or draining while a job ends."""
        return "DRAIN" in self.states

    @property
    def idle(self) -> bool:
        """Return whether no job is on it."""
        return "IDLE" in self.states and "COMPLETING" not in self.states

    @property
    def down(self) -> bool:
        """Return whether slurmctld or an administrator has taken it down."""
        return bool(self.states & {"DOWN", "FAIL", "ERROR"})

    @property
    def registered(self) -> bool:
        """Return whether its slurmd has registered and responds."""
        return not self.states & _ABSENT


def parse_node(name: str, text: str) -> SlurmNode:
    """Return the node in *text*, the output of ``scontrol show node NAME``.

    Raises:
        SlurmError: It is something else.
    """
    state = _STATE.search(text)
    if state is None:
        raise SlurmError(f"scontrol show node {name} named no state: {text.strip()[:200]!r}")
    states = frozenset(word.rstrip(_SIGNS) for word in state[1].split("+"))
    if any("*" in word for word in state[1].split("+")):
        states |= {"NOT_RESPONDING"}
    found = _REASON.search(text)
    if found is None:
        return SlurmNode(name=name, states=states)
    who = _WHO.fullmatch(found[1].rstrip())
    if who is None:
        return SlurmNode(name=name, states=states, reason=found[1].rstrip() or None)
    return SlurmNode(
        name=name,
        states=states,
        reason=who["text"],
        reason_by=who["user"],
        reason_us=_time_us(who["time"]),
    )


def _time_us(text: str) -> int | None:
    """Return the time in *text*, which scontrol prints in UTC as `Scontrol` runs it."""
    try:
        moment = datetime.strptime(text, "%Y-%m-%dT%H:%M:%S").replace(tzinfo=UTC)
    except ValueError:
        return None
    return round(moment.timestamp()) * US_PER_S


def parse_nodes(text: str) -> list[SlurmNode]:
    """Return the nodes in *text*, the output of ``scontrol show nodes``.

    Raises:
        SlurmError: There is none, or one without a state.
    """
    starts = list(_RECORD.finditer(text))
    if not starts:
        raise SlurmError(f"scontrol show nodes named no node: {text.strip()[:200]!r}")
    ends = [*(start.start() for start in starts[1:]), len(text)]
    return [
        parse_node(start[1], text[start.start() : end])
        for start, end in zip(starts, ends, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Scontrol:
    """The program, and the variables that it needs to find slurmctld."""

    program: Path
    env: Mapping[str, str]
    timeout_s: float = TIMEOUT_S

    def node(self, name: str) -> SlurmNode:
        """Return the node *name* as slurmctld knows it.

        Raises:
            SlurmError: It does not respond, or knows no such node.
        """
        return parse_node(name, self._run("show", "node", name).output)

    def nodes(self) -> list[SlurmNode]:
        """Return all nodes that slurmctld knows, by one request.

        Raises:
            SlurmError: It does not respond.
        """
        answer = self._run(
            "show", "nodes", timeout_s=CLUSTER_TIMEOUT_S, bytes_max=CLUSTER_BYTES_MAX
        )
        if answer.cut:
            raise SlurmError(f"scontrol show nodes printed more than {CLUSTER_BYTES_MAX} bytes")
        return parse_nodes(answer.output)

    def drain(self, name: str, reason: str) -> None:
        """Let no new job start on *name*, for *reason*.

        Raises:
            SlurmError: slurmctld does not respond, or refuses.
        """
        self._run("update", f"NodeName={name}", "State=DRAIN", f"Reason={reason}")

    def resume(self, name: str) -> None:
        """Let jobs start on *name* again.

        Raises:
            SlurmError: slurmctld does not respond, or refuses.
        """
        self._run("update", f"NodeName={name}", "State=RESUME")

    def _run(
        self, *words: str, timeout_s: float | None = None, bytes_max: int = BYTES_MAX
    ) -> CommandAnswer:
        env = {**self.env, "TZ": "UTC"}
        try:
            answer = ask(
                [self.program, *words], timeout_s or self.timeout_s, bytes_max=bytes_max, env=env
            )
        except ProbeError as exc:
            raise SlurmError(str(exc)) from exc
        if answer.exit_code != 0:
            asked = " ".join(words[:3])
            raise SlurmError(f"scontrol {asked} {answer.ending}: {answer.first_line()}")
        return answer


def find_scontrol(env: Mapping[str, str], directory: Path | None = None) -> Scontrol:
    """Return the `scontrol` in *directory*, or else where Debian and others install it.

    Raises:
        SlurmError: There is none; names the folders that were searched.
    """
    places = (str(directory / "scontrol"),) if directory is not None else _PLACES
    passed_on = {name: env[name] for name in _PASSED_ON if env.get(name)}
    for place in places:
        program = find(Path("/"), place)
        if program is not None:
            return Scontrol(program, passed_on)
    raise SlurmError(
        f"no scontrol in {', '.join(places)} or the usual folders; set slurm.bin_dir to its folder"
    )
