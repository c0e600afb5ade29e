"""Words beside the seats: who is seated reads them, and a witness that fails seats all the same."""

import random
from types import SimpleNamespace

import pytest
from support.agreement import World

from gpuops.control.leader import ExtensionRunner
from gpuops.control.record import Roster, RunPhase, unpack
from gpuops.control.store import VALUE_BYTES_MAX, ControlStoreUnreachableError
from gpuops.errors import EXIT_FAIL
from gpuops.incident.decision import RestartPolicy


class Witness:
    """Writes down what it hears, and says what it is told to."""

    def __init__(self, notes=None, error=None):
        self.metadata, self.error = notes or {}, error
        self.ready, self.before, self.beats = {}, None, {}

    def roster_metadata(self, record, roster, before, ready):
        self.ready, self.before = dict(ready), before
        if self.error:
            raise self.error
        return {**self.metadata, "nodes": len(roster.members)}

    def on_heartbeats(self, record, roster, beats):
        if self.error:
            raise self.error
        self.beats = dict(beats)


def world_with(witness, n_players=2, until=None):
    class WitnessedWorld(World):
        def extension(self, _player):
            return witness

    policy = RestartPolicy(nodes_min=1, nodes_max=n_players, restarts_max=3)
    world = WitnessedWorld(policy, n_players)
    world.run_until(until or (lambda w: w.all_run(0, n_players)))
    return world


def roster_of(world, generation=0):
    link = world.players[0].link
    return Roster.from_bytes(link.store.get(link.keys.roster(generation)).value)


def test_notes_are_in_the_roster_and_the_beats_of_all_are_heard():
    witness = Witness({"a": 1})
    world = world_with(witness)
    world.pass_time(3)

    assert roster_of(world).metadata == {"a": 1, "nodes": 2}
    agents = {player.me.agent for player in world.players}
    assert witness.ready.keys() == witness.beats.keys() == agents
    assert all("seq" in unpack(entry.value) for entry in witness.beats.values())


def test_a_witness_that_fails_keeps_nobody_from_a_seat():
    world = world_with(Witness(error=ValueError("a mistake")))

    assert roster_of(world).metadata == {}


def test_what_the_store_does_not_take_now_is_written_before_the_roster_not_left_out():
    witness = Witness({"a": 1}, error=ControlStoreUnreachableError("cut"))
    world = world_with(witness, until=lambda w: witness.ready)
    world.pass_time(2)
    assert world.running() == set()
    witness.error = None
    world.run_until(lambda w: w.all_run(0, 2))

    assert roster_of(world).metadata == {"a": 1, "nodes": 2}


def test_notes_that_no_store_would_take_end_the_run_and_are_not_left_out():
    long = random.Random(1).randbytes(VALUE_BYTES_MAX).hex()
    world = world_with(Witness({"long": long}), until=lambda w: w.players[0].exit_code is not None)

    assert {player.exit_code for player in world.players} == {EXIT_FAIL}
    reason = world.players[0].link.record.reason
    assert reason.startswith("the roster of generation 0 has 2 nodes and ")
    assert reason.endswith(f"a control store takes {VALUE_BYTES_MAX}")


def test_what_is_no_mapping_is_no_note():
    assert (
        Roster.from_bytes(b'{"v":1,"generation":0,"members":[],"spares":[],"notes":[1]}').metadata
        == {}
    )


@pytest.mark.parametrize("turn", [1, -1])
def test_several_are_heard_and_one_that_fails_stops_no_other(turn):
    roster = Roster(generation=0, members=())
    membership = SimpleNamespace(roster=roster, ready_entries={}, heartbeats={"a": "beat"})
    well, other = Witness({"a": 1}), Witness({"b": 2})
    extensions = [Witness(error=ValueError("a mistake")), well, other][::turn]
    runner = ExtensionRunner(membership, extensions)

    runner.pass_heartbeats(SimpleNamespace(phase=RunPhase.RUN, generation=0))

    assert well.beats == other.beats == {"a": "beat"}
    assert runner.with_metadata(None, roster).metadata == {"a": 1, "b": 2, "nodes": 0}
