"""The certificates of a run's own etcd, judged by the real openssl."""

import shutil
import subprocess
import time

import pytest
from support.services import unavailable

from gpuops.control.etcd.credentials import write_credentials

YEAR_S = 365 * 86400


@pytest.fixture
def credentials(tmp_path):
    """Return a function that makes the files of a node with a token."""
    if shutil.which("openssl") is None:
        unavailable("openssl is not installed")

    def made(token, address):
        folder = tmp_path / f"{token} $HOME # {address}"
        folder.mkdir()
        return write_credentials(folder, token, address)

    return made


def is_accepted(cert, cacert, at_s, *options):
    """Say whether *cert* is trusted on a host whose clock shows *at_s*."""
    command = ("openssl", "verify", "-attime", str(round(at_s)), *options)
    ended = subprocess.run(
        [*command, "-CAfile", cacert, cert], capture_output=True, text=True, check=False
    )
    return ended.returncode == 0


@pytest.mark.parametrize("off_s", [-YEAR_S, 0, YEAR_S], ids=["behind", "right", "ahead"])
def test_a_host_with_a_wrong_clock_trusts_the_certificates(credentials, off_s):
    ours, theirs = credentials("t", "10.0.0.1"), credentials("t", "10.0.0.2")
    at_s = time.time() + off_s

    assert is_accepted(ours["cert"], theirs["cacert"], at_s, "-verify_ip", "10.0.0.1")
    assert not is_accepted(ours["cert"], theirs["cacert"], at_s, "-verify_ip", "10.0.0.2")


def test_a_certificate_of_another_token_is_not_trusted(credentials):
    ours, theirs = credentials("t", "10.0.0.1"), credentials("u", "10.0.0.2")

    assert not is_accepted(ours["cert"], theirs["cacert"], time.time())
