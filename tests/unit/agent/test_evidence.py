"""When the flight recorders are asked while evidence is collected, and what becomes of them."""

import json
import os
from pathlib import Path

from gpuops.agent.monitors.evidence import EvidenceCollector, EvidenceTarget, SystemEvidenceReader
from gpuops.host.process.inspect import ProcessDetails

STATES = {0: "S", 1: "D", 2: "T", 3: None, 4: "R"}


class FakeReader:
    """Ranks in `STATES`; *late*: that many times rank 4 does not answer."""

    def __init__(self, late):
        self.late = late
        self.asked = []
        self.order = []

    def inspect(self, pid):
        self.order.append("state")
        return None if STATES[pid] is None else ProcessDetails(state=STATES[pid])

    def collectives(self, targets, wait_s):
        self.order.append("recorders")
        ranks = [target.rank for target in targets]
        self.asked.append([*ranks])
        if 4 in ranks and self.late:
            self.late -= 1
            ranks.remove(4)
        return {rank: {"entries": [], "pg_config": {}} for rank in ranks}

    def traffic(self, pids):
        return {}

    def dump(self, targets, wait_s):
        return {}

    def spy(self, targets, wait_s):
        self.order.append("stacks")
        return {}

    def record(self, targets):
        return None

    def source_line(self, path, line):
        return None

    def exists(self, path):
        return False

    def keep(self, folder, bodies):
        assert all(body["pg_config"] == {} for body in bodies.values())
        return folder / f"of {sorted(bodies)}"


def facts_of(reader, targets, env, *, is_forgotten=False, **more):
    collector = EvidenceCollector(
        targets, reader, env, (0.0, 0.0, 0.0), clock_s=lambda: 0.0, pause=lambda _: None, **more
    )
    if is_forgotten:
        collector.forget()
    collector.start()
    assert collector.wait(60.0)
    return collector.facts


TARGETS = [EvidenceTarget(rank=n, local_rank=n, pid=n) for n in STATES]


def collect(late):
    reader = FakeReader(late)
    facts = facts_of(reader, TARGETS, {})
    return reader, {rank for rank, each in facts.items() if each.dump is not None}


def test_recorders_are_read_before_the_stacks_of_who_can_answer():
    # Neither of who is stopped nor of who is gone; threads of a process in state D may answer.
    reader, read = collect(late=0)

    assert read == {0, 1, 4}
    assert reader.asked[0] == [0, 1, 4]
    assert reader.order[:7] == ["state"] * 5 + ["recorders", "stacks"]


def test_the_last_sample_reads_those_that_are_missing():
    reader, read = collect(late=1)

    assert read == {0, 1, 4}
    assert reader.asked == [[0, 1, 4], [4]]


def test_without_an_answer_the_evidence_is_complete_as_well():
    reader, read = collect(late=2)

    assert read == {0, 1}
    assert reader.asked == [[0, 1, 4], [4]]


def test_those_that_were_read_are_kept_unless_there_is_no_hang_after_all():
    facts = facts_of(FakeReader(late=2), TARGETS, {}, folder=Path("/run/generation-0"))
    kept = {rank: each.recorder_kept for rank, each in facts.items()}

    assert kept == dict.fromkeys(STATES) | dict.fromkeys(
        (0, 1), Path("/run/generation-0/of [0, 1]")
    )
    facts = facts_of(
        FakeReader(late=0), TARGETS, {}, is_forgotten=True, folder=Path("/run/generation-0")
    )
    assert not any(each.recorder_kept for each in facts.values())


class Silent(SystemEvidenceReader):
    """A worker whose recorder does not answer."""

    def collectives(self, targets, wait_s):
        return {}


def test_what_torch_wrote_at_a_time_out_is_read_where_nobody_answers(tmp_path):
    groups, written = tmp_path / "groups", tmp_path / "fr_0"
    groups.write_text("")
    written.write_text(json.dumps({"entries": [], "pg_config": {"0": {"ranks": [0, 1]}}}))
    target = EvidenceTarget(rank=0, local_rank=0, pid=os.getpid(), groups=groups)
    env = {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "fr_")}

    def read():
        facts = facts_of(Silent("", next_to=tmp_path), [target], env)[0]
        assert facts.recorder_path == str(written)
        return None if facts.dump is None else facts.dump.members

    os.utime(groups, (1000, 1000))
    assert read() == {"0": (0, 1)}
    # Of an earlier generation, whose workers had the same variable.
    os.utime(written, (999, 999))
    assert read() is None
    written.write_text("no dump")
    assert read() is None
    groups.unlink()
    assert read() is None
