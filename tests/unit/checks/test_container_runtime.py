"""The operator's command for the container runtime."""

import pytest
from support.checks import CASE, said

from gpuops.checks.core.check import ProbeContext
from gpuops.checks.core.profile import NO_PROFILE
from gpuops.checks.host.container_runtime import CHECK, Parameters, judge
from gpuops.host.systemd import RuntimeAnswer

DOCKER = Parameters(command=("docker", "info"), source="ops")


def answer(exit_code, **more):
    return RuntimeAnswer(command=DOCKER.command, found=True, exit_code=exit_code, **more)


@pytest.mark.parametrize(("code", "status"), [(0, "pass"), (1, "fail"), (-9, "fail")])
def test_any_other_end_than_zero_fails(code, status):
    facts = answer(code, ending=f"exited with code {code}", said="no daemon")
    (finding,) = judge(facts, DOCKER, CASE)

    assert (finding.status.word, finding.source) == (status, "ops")
    assert status == "pass" or finding.message == f"docker info exited with code {code}: no daemon"


def test_no_program_and_no_answer_are_unknown():
    gone = RuntimeAnswer(command=DOCKER.command)
    late = answer(None, ending="gave no answer in 9.0 s")

    assert judge(gone, DOCKER, CASE)[0].unknown_reason == "missing_tool"
    assert judge(late, DOCKER, CASE)[0].unknown_reason == "timeout"


def test_it_is_skipped_where_nothing_is_configured():
    assert said(judge(RuntimeAnswer(), Parameters(), CASE)) == [("n1", "skip", None)]


def test_a_command_arrives_with_all_its_words(tmp_path):
    tool = tmp_path / "usr/bin/echo-words"
    tool.parent.mkdir(parents=True)
    tool.write_text('#!/bin/sh\necho "$#: $*" >&2\nexit 3\n')
    tool.chmod(0o755)
    parameters = Parameters(command=("echo-words", "run", "a", "run", "a b"))
    asked = CHECK.inputs(parameters, NO_PROFILE)

    facts = CHECK.probe.read(ProbeContext(root=tmp_path, inputs=asked), 30)
    assert (facts.exit_code, facts.said) == (3, "4: run a run a b")
    assert CHECK.probe.read(ProbeContext(root=tmp_path), 30) == RuntimeAnswer()
