"""Where a node's failure domain is had from, and that copies are placed by it."""

import random

import pytest
from support.placements import missing_copies

from gpuops.agent.checkpoint.generation_plan import plan_generation
from gpuops.agent.checkpoint.messages import GenerationPlan, Inventory, held_states
from gpuops.agent.checkpoint.start import domain_of
from gpuops.checkpoint.placement.domains import align_paths
from gpuops.checkpoint.types import Digest, Shard, ShardCopy, StateId, Tier
from gpuops.config.schema import parse_domain
from gpuops.control.record import Member, Roster
from gpuops.wire.messages import MessageFormatError

STEP = {
    "SLURM_TOPOLOGY_ADDR": "spine.leaf3.gpu017",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
    "SLURMD_NODENAME": "gpu017",
}


def found(wanted, node="gpu017", env=STEP):
    said = []
    return domain_of(wanted, node, env, said.append), said


def test_slurm_is_believed_unless_something_else_is_named():
    assert found("auto") == (("spine", "leaf3"), [])
    assert found("row1/rack3") == (("row1", "rack3"), [])
    assert found("off") == ((), [])
    assert found("auto", env={}) == ((), [])


def test_a_file_names_the_domains_of_all_nodes(tmp_path):
    file = tmp_path / "racks"
    file.write_text("gpu[001-016]  row1/rack3\ngpu[017-032]  row1/rack4\n")
    assert found(str(file)) == (("row1", "rack4"), [])
    assert found(str(file), node="gpu017.site.org", env={}) == (("row1", "rack4"), [])
    assert found(str(file), node="nid0001") == (("row1", "rack4"), [])


@pytest.mark.parametrize("content", [None, b"SwitchName=a\xff", b"gpu1 row1 rack3\n", b"\0" * 20])
def test_a_file_that_is_of_no_use_is_said_and_stops_nothing(tmp_path, content):
    file = tmp_path / "racks"
    if content is not None:
        file.write_bytes(content)
    path, said = found(str(file))
    assert path == ()
    assert len(said) == 1
    assert str(file) in said[0]


def test_a_node_that_no_line_names_is_said(tmp_path):
    file = tmp_path / "racks"
    file.write_text("gpu1 rack3\n")
    assert found(str(file)) == (
        (),
        [f"no failure domain of gpu017 in {file}: its copies may share a failure domain"],
    )


@pytest.mark.parametrize("text", ["auto", "off", "rack3", "row1/rack3", "/etc/racks", "~/racks"])
def test_what_a_domain_may_be(text):
    assert parse_domain(text) == text


@pytest.mark.parametrize("text", ["", "row1//rack3", "two words", "/".join("a" * 17), "/a\0b"])
def test_what_a_domain_cannot_be(text):
    with pytest.raises(ValueError, match="row1/rack3"):
        parse_domain(text)


def test_paths_of_different_lengths_are_made_one():
    paths = {"a": ("spine", "leaf1"), "b": ("leaf2",), "c": ()}
    assert align_paths(paths) == {"a": ("spine", "leaf1"), "b": ("leaf2", "leaf2"), "c": ("", "")}
    assert align_paths({"a": (), "b": ()}) == {}
    assert align_paths({}) == {}


# Rosters.


def roster_of(nodes, generation=0):
    members = tuple(
        Member(agent=f"agent-{node}", node=node, address="127.0.0.1", n_workers=1) for node in nodes
    )
    return Roster(generation=generation, members=members)


def held_by(domains):
    return {f"agent-{node}": Inventory(port=7000, domain=path) for node, path in domains.items()}


def placed(domains, before=None, replicas=2):
    """Return the notes of a roster of these nodes, as they come out at the other agents."""
    notes = plan_generation(
        roster_of(domains), held_by(domains), before, replicas=replicas, excluded_step=None
    )
    return GenerationPlan.from_json(notes.to_json())


@pytest.mark.parametrize(("stored", "is_known"), [(-1, True), (2, True), (3, False)])
def test_a_directory_with_a_later_epoch_than_memory_is_looked_at_first(stored, is_known):
    roster, domains = roster_of(("a", "b"), generation=1), {"a": (), "b": ()}
    before = placed(domains)
    digest = Digest(100, b"", f"{7:064x}")
    state = StateId(2, 40)
    copies = tuple(
        ShardCopy(state, Shard(n, 2), "layout", digest, Tier.MEMORY, "a") for n in (0, 1)
    )
    held = {
        "agent-a": Inventory(port=7000, states=held_states(copies)),
        "agent-b": Inventory.from_json(Inventory(port=7000, stored_max=stored).to_json()),
    }
    notes = plan_generation(roster, held, before, replicas=2, excluded_step=None)
    assert (notes.restore is not None) == is_known
    assert notes.epoch_max == max(2, stored)
    if notes.restore is not None:
        assert (notes.restore.state, notes.restore.epoch) == (state, 3)


@pytest.mark.parametrize("is_swapped", [False, True], ids=["own ranks", "swapped"])
def test_nodes_that_serve_nothing_go_on_from_their_own_memory_alone(is_swapped):
    """As with --insecure, where each node says that it listens nowhere."""
    before = placed({"a": (), "b": ()})
    digest, state = Digest(100, b"", f"{7:064x}"), StateId(2, 40)
    held = {
        f"agent-{node}": Inventory(
            port=0,
            states=held_states(
                [ShardCopy(state, Shard(rank, 2), "layout", digest, Tier.MEMORY, node)]
            ),
        )
        for rank, node in enumerate("ba" if is_swapped else "ab")
    }
    roster = roster_of(("a", "b"), generation=1)
    notes = plan_generation(roster, held, before, replicas=1, excluded_step=None)

    assert notes.peers == {}
    assert (notes.restore is not None and notes.restore.state) == (not is_swapped and state)


def test_copies_lie_in_different_domains():
    domains = {f"n{at}": ("row1", f"rack{at % 4}") for at in range(8)}
    notes = placed(domains)
    assert (notes.n_domains, notes.together) == (4, 0)
    for node in domains:
        one, other = notes.placement.holders(node)
        assert domains[one] != domains[other]
    # Without knowing of them, the same nodes would keep copies in their own rack.
    unknown = placed(dict.fromkeys(domains, ()))
    one, other = unknown.placement.holders("n0")
    assert domains[one] == domains[other]
    assert (unknown.n_domains, unknown.together) == (None, 0)


def test_all_agents_place_the_same_whatever_the_order_of_what_they_heard():
    domains = {f"n{at}": (f"rack{at % 3}",) for at in range(11)}
    items = list(held_by(domains).items())
    found = set()
    for seed in range(20):
        random.Random(seed).shuffle(items)
        notes = plan_generation(
            roster_of(domains), dict(items), None, replicas=2, excluded_step=None
        )
        found.add(repr(notes.placement))
    assert len(found) == 1


@pytest.mark.parametrize(
    ("domains", "n_domains", "together"),
    [
        ({"a": ("r",), "b": ("r",), "c": ("r",), "d": ("r",)}, 1, 4),
        ({"a": ("r",), "b": ("r",), "c": ("r",), "d": ("s",)}, 2, 2),
        # Two that nobody knows anything of are not taken for apart.
        ({"a": (), "b": (), "c": (), "d": ("s",)}, 2, 2),
        ({"a": ("r",), "b": ("s",), "c": (), "d": ()}, 3, 0),
        ({"a": ("r",)}, 1, 0),
    ],
)
def test_what_cannot_be_kept_apart_is_counted(domains, n_domains, together):
    notes = placed(domains)
    assert (notes.n_domains, notes.together) == (n_domains, together)


def test_one_copy_is_never_kept_apart():
    assert placed({"a": ("r",), "b": ("r",)}, replicas=1).together == 0


def test_a_newcomer_takes_the_seat_of_who_is_gone_and_nobody_else_moves():
    domains = {f"n{at}": (f"rack{at // 4}",) for at in range(8)}
    before = placed(domains)
    after = placed({**{n: d for n, d in domains.items() if n != "n1"}, "n9": ("rack0",)}, before)
    gone = set(before.placement.holders("n1")) - {"n1"}
    pairs = missing_copies(before.placement, after.placement)
    assert {node for pair in pairs for node in pair} == gone | {"n9"}
    assert after.together == 0


@pytest.mark.parametrize("domain", ["rack1", [""], ["x" * 300], ["a"] * 17, [3], {"a": 1}])
def test_a_domain_that_another_agent_made_up_is_refused(domain):
    with pytest.raises(MessageFormatError):
        Inventory.from_json({**Inventory(port=1).to_json(), "domain": domain})


def test_an_agent_of_before_there_were_domains_is_understood():
    body = Inventory(port=1, domain=("r",)).to_json()
    del body["domain"]
    assert Inventory.from_json(body).domain == ()
