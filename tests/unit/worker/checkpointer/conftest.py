"""A node's keeper without processes, and what the user is told."""

import logging

import pytest
from support.in_process_keeper import InProcessNode


@pytest.fixture
def node():
    node = InProcessNode()
    yield node
    node.close()


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, logger="gpuops")
    return lambda: [record.getMessage() for record in caplog.records]
