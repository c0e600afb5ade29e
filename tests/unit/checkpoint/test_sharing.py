"""Who of a node's ranks has the one copy of what they hold alike, and how images say so."""

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.checkpoint.image import TensorSpec, plan_image, read_layout, read_owners
from gpuops.checkpoint.sharing import assign_owners, plan_sharing
from gpuops.checkpoint.types import CorruptError, Shard

ALL = (0, 1, 2, 3)
NAMES = ("a", "b", "c", "d")


def spec(name, n_floats=1000):
    return TensorSpec(name, "F32", (n_floats,), 4 * n_floats, (0,), (n_floats,))


def layout_of(rank, names=NAMES, ranks=ALL, node=ALL, own=("mean",)):
    """The image of a rank that holds *names* like *ranks* do, some of them on its *node*."""
    shard = Shard(rank, 4)
    specs = [spec(name) for name in (*names, *own)]
    replicas = dict.fromkeys(names, ranks)
    return plan_image(shard, specs, 100, replicas, plan_sharing(shard, specs, replicas, node))


@given(st.lists(st.integers(0, 10**9), max_size=50), st.sets(st.integers(0, 999), min_size=1))
def test_owners_have_about_as_many_bytes_each_whoever_computes_it(sizes, ranks):
    owners = assign_owners(sizes, sorted(ranks))
    loads = {
        rank: sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank)
        for rank in ranks
    }

    assert len(owners) == len(sizes)
    assert set(owners) <= ranks
    assert max(loads.values()) - min(loads.values()) <= max(sizes, default=0)
    assert assign_owners(sizes, sorted(ranks, reverse=True)) == owners


def test_each_tensor_is_in_one_image_of_the_node_and_what_a_rank_has_for_itself_in_its_own():
    layouts = [layout_of(rank, node=(2, 3)) for rank in (2, 3)]
    names = [tensor.spec.name for layout in layouts for tensor in layout.tensors]

    assert sorted(names) == ["a", "b", "c", "d", "mean", "mean"]
    for layout, other in zip(layouts, (3, 2), strict=True):
        assert set(layout.owner_by_name.values()) == {other}
        assert layout.digests.spec.nbytes == 16 * len(layout.owner_by_name) == 32
        assert read_layout(layout.header, nbytes=layout.nbytes) == layout
        assert read_owners(layout.header + bytes(layout.nbytes - len(layout.header))) == {other}


@pytest.mark.parametrize(
    ("ranks", "node"), [(ALL, (0,)), ((0, 2), (0, 1)), (ALL, ())], ids=["alone", "apart", "off"]
)
def test_a_rank_without_a_partner_on_its_node_has_an_image_of_the_first_format(ranks, node):
    layout = layout_of(0, ranks=ranks, node=node)

    assert layout.shared == ()
    assert len(layout.tensors) == 5
    assert b'\\"format\\":1' in layout.header
    assert layout == plan_image(
        Shard(0, 4), [spec(n) for n in (*NAMES, "mean")], 100, dict.fromkeys(NAMES, ranks)
    )


def tampered(layout, change):
    """Return *layout*'s header with its groups changed by *change*."""
    tree = json.loads(layout.header[8:])
    own = json.loads(tree["__metadata__"]["gpuops"])
    change(own["shared"])
    tree["__metadata__"]["gpuops"] = json.dumps(own)
    n = len(layout.header) - 8
    return struct.pack("<Q", n) + json.dumps(tree).encode().ljust(n)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda groups: groups[0]["owners"].__setitem__(0, 9), "not among those that share"),
        (lambda groups: groups[0]["owners"].pop(), "have 3 owners"),
        (lambda groups: groups[0]["owners"].reverse(), "has no digest"),
        (lambda groups: groups[0].__setitem__("stored", [0, 1]), "has no digest"),
        (lambda groups: groups[0].__setitem__("stored", [0, 4]), "no 4 digests"),
        (lambda groups: groups[0].__setitem__("ranks", [2, 4]), "not among those that share"),
        (lambda groups: groups[0]["names"].__setitem__(1, "x"), "owner alone"),
        (lambda groups: groups.append(groups[0]), "shared twice"),
        (lambda groups: groups.__setitem__(0, 5), "cannot be|is wrong"),
    ],
)
def test_what_is_shared_must_make_sense(change, says):
    layout = layout_of(1, node=(0, 1))
    with pytest.raises(CorruptError, match=says):
        read_layout(tampered(layout, change), nbytes=layout.nbytes)
