"""The statement at a line, and what it waits for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.agent.monitors.source_line import Awaited, awaited_in, statement_at

SOURCE = """import torch
def train():
    total = (
        # the first
        one(x)

        + two(y)
    )
    if (a and
            b):
        text = '''
if loss > 0:
'''

        return total; done()
last()"""
TOTAL = "    total = (\n        # the first\n        one(x)\n\n        + two(y)\n    )"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (1, "import torch"),
        (2, "def train():"),
        *((n, TOTAL) for n in (3, 5, 8)),
        (9, "    if (a and\n            b):"),
        (10, "    if (a and\n            b):"),
        (12, "        text = '''\nif loss > 0:\n'''"),
        (14, None),
        (15, "        return total; done()"),
        (16, "last()"),
        *((n, None) for n in (0, -1, 17)),
    ],
)  # fmt: skip
def test_a_statement_has_all_its_lines(line, says):
    assert statement_at(SOURCE, line) == says


def test_what_this_python_cannot_read_is_one_line():
    assert statement_at("good()\nbad = (\nx.item()\n", 3) == "x.item()"


@given(st.text(max_size=200), st.integers(-1, 9))
def test_any_text_can_be_read(text, line):
    found = statement_at(text, line)
    assert awaited_in(found or text)[0] in Awaited


def test_a_statement_as_deep_as_a_file_allows_is_no_error():
    assert awaited_in("(" * 50_000) == (Awaited.NOTHING, False)
    assert awaited_in("-" * 200_000 + "x")[0] is Awaited.NOTHING
