"""RAM for copies: the figures, what is refused, and in which order things are given up."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.checkpoint.placement.estimate import RamNeed, RamSaving, ram_options, ram_refusal
from gpuops.checkpoint.types import CheckpointError

GB = 10**9


def test_a_70b_model_on_64_gpus_needs_420_gb_a_node():
    need = RamNeed(ranks=8, bytes_per_rank=13_125_000_000, replicas=2)

    assert need.state_bytes == 105 * GB
    assert (need.own_bytes, need.peers_bytes) == (210 * GB, 210 * GB)
    assert str(need) == "420.0 GB a node (2 slots x 8 ranks x 13.1 GB x 2 copies)"


def test_what_ranks_of_a_node_hold_alike_is_needed_once():
    need = RamNeed(ranks=8, bytes_per_rank=24 * GB, replicas=1, shared_bytes=24 * GB - 10**6)

    assert need.state_bytes == 24 * GB + 7 * 10**6
    assert need.copied_bytes == need.state_bytes / 8
    assert str(need) == "48.0 GB a node (2 slots x (24.0 GB + 8 ranks x 1.0 MB))"
    with pytest.raises(CheckpointError, match="cannot share 25"):
        RamNeed(ranks=8, bytes_per_rank=24, replicas=1, shared_bytes=25)


def test_what_is_given_up_and_in_which_order():
    need = RamNeed(ranks=8, bytes_per_rank=12 * GB, replicas=2, slots=3, copy_slots=3)

    assert [(option.saving, option.need.total_bytes // GB) for option in ram_options(need)] == [
        (RamSaving.NOTHING, 576),
        (RamSaving.SPARSE_COPIES, 480),
        (RamSaving.TWO_SLOTS, 384),
        (RamSaving.WEIGHTS_ONLY, 128),
        (RamSaving.NO_COPIES, 64),
    ]


def test_a_rung_that_saves_nothing_is_left_out():
    need = RamNeed(ranks=8, bytes_per_rank=12 * GB, replicas=1)

    assert [option.saving for option in ram_options(need)] == [
        RamSaving.NOTHING,
        RamSaving.WEIGHTS_ONLY,
    ]


def test_what_does_not_fit_is_refused_with_figures_and_the_first_that_would():
    need = RamNeed(ranks=8, bytes_per_rank=12 * GB, replicas=2, slots=3, copy_slots=3)

    assert ram_refusal(need, 576 * GB) is None
    assert ram_refusal(need, 576 * GB - 1) == (
        "checkpoints need 576.0 GB a node (3 slots x 8 ranks x 12.0 GB x 2 copies), and 576.0 GB"
        " are available; copies of only some saves, in two slots would fit: 480.0 GB a node"
        " (3 slots x 8 ranks x 12.0 GB, and 192.0 GB for peers, 2 slots)"
    )
    assert ram_refusal(need, 60 * GB) == (
        "checkpoints need 576.0 GB a node (3 slots x 8 ranks x 12.0 GB x 2 copies), and 60.0 GB"
        " are available; nothing fits, the smallest option is 64.0 GB a node"
        " (2 slots x 8 ranks x 4.0 GB)"
    )


def test_a_holder_has_itself_what_all_ranks_share():
    need = RamNeed(ranks=8, bytes_per_rank=24 * GB, replicas=2, shared_bytes=24 * GB - 10**6)

    assert need.replica_bytes == 8 * 10**6
    assert need.total_bytes == 2 * (24 * GB - 10**6) + 4 * 8 * 10**6
    assert str(need) == (
        "48.0 GB a node (2 slots x (24.0 GB + 8 ranks x 1.0 MB), and 16.0 MB for peers, 2 slots)"
    )


@pytest.mark.parametrize(
    ("shards", "n_shards", "disk_bytes"),
    [
        (1, 1, GB / 4),
        (2, 2, 2 * GB / 4),
        (8, 8, 8 * GB / 4),
        (16, 8, 16 * GB / 4),
        (512, 8, 8 * GB),  # more than are written once
    ],
)
def test_hsdp_has_each_shard_once_a_node_and_writes_it_once(shards, n_shards, disk_bytes):
    own = 1000
    need = RamNeed(ranks=8, bytes_per_rank=GB + own, replicas=2, shared_bytes=GB, shards=shards)

    assert need.state_bytes == n_shards * GB + 8 * own
    assert need.persisted_bytes(4) == disk_bytes + 8 * own
    assert need.replica_bytes == 8 * own
    assert replace(need, are_alike=False).replica_bytes == need.state_bytes


def test_nodes_with_parts_of_shards_are_an_error():
    with pytest.raises(CheckpointError, match="nodes of 8 ranks do not have whole parts of 12"):
        RamNeed(ranks=8, bytes_per_rank=1, replicas=1, shards=12)


@given(
    st.builds(
        RamNeed,
        ranks=st.integers(1, 16),
        bytes_per_rank=st.integers(10**6, 10**12),
        shared_bytes=st.integers(0, 10**6),
        replicas=st.integers(1, 5),
        slots=st.integers(2, 5),
        copy_slots=st.integers(2, 5),
    ),
    st.integers(0, 10**14),
)
def test_each_option_needs_less_and_only_what_does_not_fit_is_refused(need, available):
    sizes = [option.need.total_bytes for option in ram_options(need)]

    assert sizes == sorted(set(sizes), reverse=True)
    copies_bytes = need.replica_bytes * need.copy_slots * (need.replicas - 1)
    assert need.total_bytes == need.state_bytes * need.slots + copies_bytes
    assert (need.replica_bytes == need.state_bytes) == (need.shared_bytes == 0)
    assert (ram_refusal(need, available) is None) == (need.total_bytes <= available)


@pytest.mark.parametrize(
    "wrong",
    [
        {"ranks": 0},
        {"bytes_per_rank": 0},
        {"replicas": 0},
        {"slots": 1},
        {"copy_slots": 1},
        {"shards": 0},
    ],
)
def test_less_than_a_copy_in_two_slots_is_an_error(wrong):
    with pytest.raises(CheckpointError, match="at least one of each and 2 slots"):
        RamNeed(**{"ranks": 8, "bytes_per_rank": 1, "replicas": 2, **wrong})
