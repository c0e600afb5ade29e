"""Log text is hostile: nothing it holds may drive a terminal."""

import logging
import subprocess
import sys

import pytest

from gpuops.log import log_notice, printable, setup


def test_control_characters_are_replaced_and_text_is_kept():
    shown = printable("\ud800\x1b[2J\rloss\x07 3.1\tümläut \x9b31m \u202eback\u2066\n")

    assert not set(shown) & {"\x1b", "\r", "\x07", "\x9b", "\u202e", "\u2066"}
    assert "loss" in shown.encode().decode()
    assert shown.endswith("�\n")
    assert "ümläut" in shown


def test_a_warning_is_one_line_on_standard_error(capsys):
    setup()
    logging.getLogger("gpuops.test").warning("spool %s is full", "/x\x1b[0m")

    assert capsys.readouterr().err == "gpuops: WARNING: spool /x�[0m is full\n"


def test_news_are_shown_without_a_level_and_other_information_is_not(capsys):
    setup()
    logging.getLogger("gpuops.test").info("nobody asked")
    log_notice("resumed from step %s\x1b")

    assert capsys.readouterr().err == "gpuops: resumed from step %s�\n"


@pytest.mark.parametrize(
    ("program", "shown"),
    [
        ("", "gpuops: WARNING: the keeper is gone\n"),
        ("logging.basicConfig(format='job: %(message)s')", "job: the keeper is gone\n"),
    ],
    ids=["as it is", "configured by the program"],
)
def test_a_warning_in_a_users_program_is_shown_once_and_says_whose_it_is(program, shown):
    lines = (
        "import logging",
        "from gpuops.log import logger_in_job",
        program,
        "logger_in_job('gpuops.x').info('no')",
        "logger_in_job('gpuops.x').warning('the keeper is gone')",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    )

    assert done.stderr == shown
