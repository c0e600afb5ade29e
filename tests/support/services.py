"""Whether a service that a test needs may be missing."""

import os
from typing import NoReturn

import pytest

REQUIRED = os.environ.get("GPUOPS_TEST_REQUIRE_SERVICES") == "1"


def unavailable(reason: str) -> NoReturn:
    """Skip with *reason*; fail instead where CI forbids skipping service tests."""
    if REQUIRED:
        pytest.fail(f"{reason} (and skipping is forbidden here)", pytrace=False)
    pytest.skip(reason)
