"""Which values of torchrun's flags are refused before anything starts."""

import argparse

import pytest

from gpuops.agent.launch.option_values import (
    check_log_dir,
    check_startable,
    check_values,
    why_no_interpreter,
)
from gpuops.errors import UsageError

BACKENDS = ("static", "c10d")
GOOD = {
    "nnodes": "1",
    "nproc_per_node": "gpu",
    "redirects": "0",
    "tee": "3",
    "rdzv_backend": "static",
    "signals_to_handle": "SIGTERM,SIGINT",
}


def check(**values):
    check_values(argparse.Namespace(**{**GOOD, **values}), BACKENDS)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"nnodes": "2:4"},
        {"nproc_per_node": "8"},
        {"tee": "0:1,1:3"},
        {"rdzv_backend": "c10d"},
        {"signals_to_handle": None},
    ],
    ids=str,
)
def test_what_torch_takes_is_taken(values):
    check(**values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"nnodes": "a:b"}, "--nnodes=a:b"),
        ({"nnodes": "4:2"}, "--nnodes=4:2"),
        ({"nnodes": "0"}, "--nnodes=0"),
        ({"nproc_per_node": "0"}, "--nproc-per-node=0"),
        ({"nproc_per_node": "-1"}, "--nproc-per-node=-1"),
        ({"tee": "7"}, "--tee=7"),
        ({"redirects": "0:1,2"}, "--redirects=0:1,2"),
        ({"rdzv_backend": "zzz"}, "--rdzv-backend=zzz: torch knows c10d, static"),
        ({"signals_to_handle": "SIGTERM,SIGFOO"}, "'SIGFOO'"),
        ({"signals_to_handle": "SIGKILL"}, "'SIGKILL'"),
    ],
    ids=str,
)
def test_a_refused_value_is_named_with_its_flag(values, said):
    with pytest.raises(UsageError) as caught:
        check(**values)

    assert said in str(caught.value)


def test_a_log_directory_is_made_or_refused(tmp_path):
    check_log_dir(str(tmp_path / "a" / "b"))
    (tmp_path / "file").touch()

    assert (tmp_path / "a" / "b").is_dir()
    with pytest.raises(UsageError, match="--log-dir"):
        check_log_dir(str(tmp_path / "file"))


def test_a_program_without_execute_permission_cannot_be_started(tmp_path):
    (tmp_path / "python").touch()

    with pytest.raises(UsageError, match="not an executable file"):
        check_startable(str(tmp_path / "python"))


def test_the_interpreter_of_a_script_must_be_there(tmp_path):
    script = tmp_path / "bad.sh"
    for text, is_bad in (("#!/no/sh\n", True), ("#! /bin/sh -e\n", False), ("echo\n", False)):
        script.write_text(text)
        assert (why_no_interpreter(str(script)) is not None) == is_bad
