"""The reasons of our drains."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.slurm.reason import LENGTH_MAX, is_ours, reason_text

GPU = "GPU-1a2bcdef-0000-1111-2222-333344445555"
INCIDENT = "0192f0a0-7d3c-7c1e-9a55-0123456789ab"


def test_a_reason_tells_check_part_value_action_and_incident():
    reason = reason_text("gpu_xid", GPU, "79", "reboot", INCIDENT)

    assert reason == "gpuops: fail gpu_xid GPU-1a2b 79 -> reboot #456789ab"


def test_without_a_value_or_an_incident_there_is_no_gap():
    assert reason_text("munge", "n1", None, "drain", None) == "gpuops: fail munge n1 -> drain"


@pytest.mark.parametrize(("entity", "kept"), [("x" * 20, "x" * 20), ("x" * 60, None)])
def test_where_it_is_too_long_the_value_gives_way_first_then_the_part(entity, kept):
    reason = reason_text("mount_alive", entity, "v" * 40, "drain", INCIDENT)

    assert reason == f"gpuops: fail mount_alive{f' {kept}' if kept else ''} -> drain #456789ab"


texts = st.text(max_size=120)


@given(texts, texts, st.none() | texts, st.none() | texts)
def test_every_reason_is_one_line_of_80_plain_characters_and_ours(check, entity, value, incident):
    reason = reason_text(check, entity, value, "drain", incident)

    assert len(reason) <= LENGTH_MAX
    assert reason.isascii()
    assert reason.isprintable()
    assert is_ours(reason)


@pytest.mark.parametrize("reason", [None, "", "Prolog error", "see gpuops: fail x", "gpuops"])
def test_other_reasons_are_not_ours(reason):
    assert not is_ours(reason)
