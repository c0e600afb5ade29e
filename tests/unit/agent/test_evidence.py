"""When the flight recorders are asked while evidence is collected."""

from gpuops.agent.monitors.evidence import EvidenceCollector, EvidenceTarget
from gpuops.detect.recorder_dump import RankDump
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
        return {rank: RankDump(rank=rank, calls=(), members={}) for rank in ranks}

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


def collect(late):
    reader = FakeReader(late)
    targets = [EvidenceTarget(rank=n, local_rank=n, pid=n) for n in STATES]
    collector = EvidenceCollector(
        targets, reader, {}, (0.0, 0.0, 0.0), clock_s=lambda: 0.0, pause=lambda _: None
    )
    collector.start()
    assert collector.wait(60.0)
    return reader, {rank for rank, facts in collector.facts.items() if facts.dump is not None}


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
