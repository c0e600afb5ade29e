"""The textfile is what Prometheus reads, whatever the findings say."""

import os
import shutil
import socket
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from support.checks import NODE
from support.services import unavailable

from gpuops.checks.core.runner import CheckRun
from gpuops.cli.check.request import metrics
from gpuops.cli.main import run_command
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status

LABELS = ("suite", "check", "entity_kind", "entity_id")
MOUNT = Entity(EntityKind.MOUNT, '/data "new"\\\n{x}')


def finding(check, status, entity=NODE):
    failed = FailureClass.UNRESOLVED if status is Status.FAIL else None
    return Finding(check=check, entity=entity, status=status, message="", failure_class=failed)


def run(*findings, late=()):
    return CheckRun(
        suite="prolog",
        node="n1",
        start_us=1_000_000,
        end_us=3_500_000,
        findings=findings,
        late=late,
    )


def samples(ran):
    """Return the metrics as Prometheus' own parser reads them, by name and labels."""
    return {
        (sample.name, *(sample.labels[name] for name in LABELS if name in sample.labels)): (
            sample.value
        )
        for family in text_string_to_metric_families(metrics(ran).decode())
        for sample in family.samples
    }


def test_the_names_and_labels_are_the_documented_ones():
    ran = run(finding("memory", Status.PASS), late=("load",))

    assert samples(ran) == {
        ("gpuops_check_status", "prolog", "memory", "node", "n1"): 0,
        ("gpuops_check_verdict", "prolog"): 0,
        ("gpuops_check_late", "prolog"): 1,
        ("gpuops_check_last_run_timestamp_seconds", "prolog"): 3.5,
        ("gpuops_check_duration_seconds", "prolog"): 2.5,
    }


@pytest.mark.parametrize(
    ("status", "value"),
    [(Status.PASS, 0), (Status.SKIP, 1), (Status.WARN, 2), (Status.FAIL, 4)],
)
def test_each_status_has_its_number(status, value):
    assert samples(run(finding("x", status)))[
        "gpuops_check_status", "prolog", "x", "node", "n1"
    ] == (value)


def test_of_several_findings_about_one_thing_the_worst_counts():
    found = samples(run(finding("x", Status.FAIL), finding("x", Status.WARN)))

    assert found["gpuops_check_status", "prolog", "x", "node", "n1"] == 4


@given(st.text(min_size=1))
def test_any_name_of_an_entity_can_be_read_back(name):
    ran = run(finding("x", Status.PASS, Entity(EntityKind.MOUNT, name)))

    assert len(samples(ran)) == 5


def test_promtool_finds_nothing_wrong():
    if shutil.which("promtool") is None:
        unavailable("promtool is not installed (Debian: prometheus)")
    ran = run(finding("x", Status.FAIL), finding("y", Status.WARN, MOUNT))
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=metrics(ran), capture_output=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    "words", [["check", "--no-record", "--only=load", "--prom"], ["facts", "--out"]]
)
@pytest.mark.parametrize("kind", ["fifo", "link", "socket"])
def test_a_target_that_is_no_regular_file_is_refused_and_stays(tmp_path, capfd, words, kind):
    """/dev/null was replaced by a file, which a test must not try."""
    path = tmp_path / "target"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    before = path.lstat()

    assert run_command([*words, str(path)]) == 64
    assert (
        f"{path} is {'a link' if kind == 'link' else 'no regular file'}" in capfd.readouterr().err
    )
    assert path.lstat() == before
    assert list(tmp_path.iterdir()) == [path]
