"""Units by a fake systemctl."""

import pytest
from support.fake_root import FakeRoot

from gpuops.errors import ProbeError
from gpuops.host.systemd import Unit, Units, parse_show, read_units

SHOWN = """Id=munge.service
Names=munge.service
LoadState=loaded
ActiveState=active
SubState=running
Result=success
NRestarts=0

Id=slurmd.service
Names=slurmd.service slurm.service
LoadState=loaded
ActiveState=failed
SubState=failed
Result=exit-code
NRestarts=3

Id=nothing.service
Names=nothing.service
LoadState=not-found
ActiveState=inactive
SubState=dead
Result=success
"""


@pytest.fixture
def root(tmp_path):
    root = FakeRoot(tmp_path)
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    return root


def systemctl(root, script):
    root.write("usr/bin/systemctl", f"#!/bin/sh\n{script}\n")
    (root.path / "usr/bin/systemctl").chmod(0o755)


def test_units_are_told_apart_by_any_of_their_names():
    munge, slurm, nothing = parse_show(SHOWN, ("munge", "slurm.service", "nothing"))

    assert munge == Unit(
        name="munge", load="loaded", active="active", sub="running", result="success", restarts=0
    )
    assert (slurm.name, slurm.active, slurm.restarts) == ("slurm.service", "failed", 3)
    assert (nothing.load, nothing.restarts) == ("not-found", None)
    assert parse_show("", ("munge",)) == ()


def test_systemctl_is_asked_for_exactly_the_units_wanted(root):
    words = root.path / "words"
    systemctl(root, f'echo "$*" > {words}\necho Id=munge.service\necho ActiveState=active')

    assert read_units(root.path, 20, ("munge", "-x")).units[0].active == "active"
    assert words.read_text().endswith(" -- munge -x\n")


def test_without_systemd_nothing_is_asked(tmp_path):
    assert read_units(tmp_path, 5, ("munge",)) == Units(systemd=False)


def test_without_units_nothing_is_asked(root):
    assert read_units(root.path, 5, ()) == Units(systemd=True)


@pytest.mark.parametrize(
    ("script", "reason"),
    [(None, "missing_tool"), ("exit 1", "not_supported"), ("exec sleep 1000", "timeout")],
)
def test_what_cannot_be_asked_is_said_with_its_reason(root, script, reason):
    if script:
        systemctl(root, script)

    with pytest.raises(ProbeError) as caught:
        read_units(root.path, 0.9 if reason == "timeout" else 20, ("munge",))
    assert caught.value.reason == reason
