"""What `scontrol` says of a node, and a `scontrol` that says nothing useful."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.errors import SlurmError
from gpuops.slurm.scontrol import (
    Scontrol,
    SlurmNode,
    find_scontrol,
    parse_node,
    parse_nodes,
)

# As Slurm 22.05 prints it.
SHOWN = """\
NodeName=n1 Arch=x86_64 CoresPerSocket=1
   CPUAlloc=0 CPUEfctv=4 CPUTot=4 CPULoad=0.09
   AvailableFeatures=(null)
   State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Partitions=main
   ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s
{reason}
"""


def shown(state="IDLE", reason=""):
    return SHOWN.format(state=state, reason=f"   Reason={reason}" if reason else "")


def test_a_drained_node_has_its_reason_and_who_gave_it():
    view = parse_node("n1", shown("IDLE+DRAIN", "Prolog error [root@2026-11-20T21:50:07]"))

    assert view == SlurmNode(
        name="n1",
        states=frozenset({"IDLE", "DRAIN"}),
        reason="Prolog error",
        reason_by="root",
        reason_us=1_795_211_407_000_000,
    )


@pytest.mark.parametrize(
    ("state", "drained", "down", "registered"),
    [
        ("IDLE", False, False, True),
        ("MIXED+DRAIN", True, False, True),
        ("IDLE*+DRAIN", True, False, False),
        ("IDLE+DRAIN+NOT_RESPONDING", True, False, False),
        ("DOWN", False, True, True),
        ("DOWN*", False, True, False),
        ("IDLE~", False, False, True),
        ("UNKNOWN", False, False, False),
        ("FUTURE", False, False, False),
    ],
)
def test_the_signs_and_flags_of_a_state_are_read(state, drained, down, registered):
    view = parse_node("n1", shown(state))

    assert (view.drained, view.down, view.registered) == (drained, down, registered)


def test_a_reason_may_hold_what_looks_like_its_end():
    text = "ann: see [bob@home] and x=1 [root@2026-11-20T21:50:07]"

    assert parse_node("n1", shown("IDLE+DRAIN", text)).reason == "ann: see [bob@home] and x=1"


@given(st.text(st.characters(codec="ascii", categories=("L", "N", "P", "S", "Zs")), min_size=1))
def test_any_reason_of_one_line_comes_back_as_it_was_given(reason):
    reason = reason.strip()
    view = parse_node("n1", shown("IDLE+DRAIN", f"{reason} [ann@2026-11-20T21:50:07]"))

    assert (view.reason or "", view.reason_by) == (reason, "ann")


# As Slurm 22.05 and later print nodes; the second has a reason of several lines and a comment.
ALL_SHOWN = """\
NodeName=n1 Arch=x86_64 CoresPerSocket=1
   CPUAlloc=0 CPUEfctv=4 CPUTot=4 CPULoad=0.09
   State=IDLE ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s

NodeName=n2.site Arch=x86_64 CoresPerSocket=1
   CPUAlloc=0 CPUEfctv=4 CPUTot=4 CPULoad=0.09
   State=DOWN+DRAIN+MAINTENANCE+RESERVED ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A
   CurrentWatts=0 AveWatts=0

   Reason=ann: swapping a cable [ann@2026-11-25T22:39:14]
          NodeName=n9 Arch=x
             State=IDLE
             Reason=never said [bob@2020-01-01T00:00:00]
   Comment=Reason=none
   ReservationName=repair

NodeName=n3 Arch=x86_64 CoresPerSocket=1
   State=IDLE+DRAIN ThreadsPerCore=1
   Reason=no time [ann@Unknown]

"""


def test_all_nodes_are_read_and_no_line_of_a_reason_begins_one():
    assert parse_nodes(ALL_SHOWN) == [
        SlurmNode(name="n1", states=frozenset({"IDLE"})),
        SlurmNode(
            name="n2.site",
            states=frozenset({"DOWN", "DRAIN", "MAINTENANCE", "RESERVED"}),
            reason="ann: swapping a cable",
            reason_by="ann",
            reason_us=1_795_646_354_000_000,
        ),
        SlurmNode(
            name="n3", states=frozenset({"IDLE", "DRAIN"}), reason="no time", reason_by="ann"
        ),
    ]


@pytest.mark.parametrize("text", ["", "No nodes in the system\n", " NodeName=n1\n"])
def test_an_answer_without_nodes_is_an_error(text):
    with pytest.raises(SlurmError, match="scontrol show nodes named no node"):
        parse_nodes(text)


@pytest.mark.parametrize("text", ["", "slurm_load_node error", "Node n1 not found"])
def test_anything_else_is_an_error_that_shows_it(text):
    with pytest.raises(SlurmError, match="scontrol show node n1 named no state"):
        parse_node("n1", text)


@given(st.text(max_size=300))
def test_no_text_breaks_the_parser(text):
    try:
        view = parse_node("n1", text)
    except SlurmError:
        return
    assert view.states


def scontrol(tmp_path, script, timeout_s=5.0):
    program = tmp_path / "scontrol"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return Scontrol(program, {"SLURM_CONF": "/etc/slurm.conf"}, timeout_s)


def test_a_drain_is_asked_for_in_the_words_of_scontrol(tmp_path):
    said = tmp_path / "said"
    asked = scontrol(tmp_path, f'printf "%s|" "$SLURM_CONF" "$@" >>{said}; echo >>{said}')
    asked.drain("n1", "gpuops: fail x 'y' -> drain")
    asked.resume("n1")

    assert said.read_text().splitlines() == [
        "/etc/slurm.conf|update|NodeName=n1|State=DRAIN|Reason=gpuops: fail x 'y' -> drain|",
        "/etc/slurm.conf|update|NodeName=n1|State=RESUME|",
    ]


def test_what_scontrol_complains_of_is_in_the_error(tmp_path):
    refusing = scontrol(tmp_path, "echo 'Unable to contact slurm controller' >&2; exit 1")

    with pytest.raises(SlurmError, match="exited with code 1: Unable to contact slurm controller"):
        refusing.node("n1")


def test_a_scontrol_that_hangs_is_given_up(tmp_path):
    hanging = scontrol(tmp_path, "exec sleep 60", timeout_s=0.2)

    with pytest.raises(SlurmError, match=r"scontrol show node n1 gave no answer in \d"):
        hanging.node("n1")


def test_scontrol_is_taken_from_the_folder_that_the_site_names(tmp_path):
    scontrol(tmp_path, "exit 0")
    found = find_scontrol({"SLURM_CONF": "/x", "PATH": "/nowhere", "LD_PRELOAD": "/evil"}, tmp_path)

    assert found.program == tmp_path / "scontrol"
    assert dict(found.env) == {"SLURM_CONF": "/x"}


def test_a_missing_scontrol_is_an_error_that_says_what_to_set(tmp_path):
    with pytest.raises(SlurmError, match=r"set slurm\.bin_dir"):
        find_scontrol({}, tmp_path)


def test_all_nodes_are_asked_for_at_once_and_in_utc(tmp_path):
    script = """echo "$@ $TZ" >&2
[ "$1 $2 $3 $TZ" = "show nodes  UTC" ] || exit 1
i=0
while [ $i -lt 3000 ]; do
    i=$((i+1))
    printf 'NodeName=n%d Arch=x86_64\n   State=IDLE %0400d\n\n' $i 0
done"""
    found = scontrol(tmp_path, script, timeout_s=0.001).nodes()

    assert [node.name for node in found[:2]] == ["n1", "n2"]
    assert len(found) == 3000
