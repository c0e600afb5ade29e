"""Ctrl-C ends the tests, also those that a shell runs in the background."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# A plug-in shows what the process that hands out the tests does with the signal.
SHOW = """
import signal, sys
import pytest

signal.signal(signal.SIGINT, signal.SIG_IGN)

class Show:
    @pytest.hookimpl(trylast=True)
    def pytest_configure(self):
        print("heeds", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        raise pytest.UsageError("seen enough")

pytest.main(["-n", "1", "-q", "tests/unit/test_interrupts.py"], plugins=[Show()])
"""


def test_the_process_that_hands_out_tests_heeds_an_ignored_interrupt():
    ran = subprocess.run(
        [sys.executable, "-c", SHOW], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert "heeds True" in ran.stdout, ran.stdout + ran.stderr
