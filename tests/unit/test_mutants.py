"""The mutants of `make mutation` fit the code: each text is there once, each test file is there."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MUTANTS_MIN = 60


def test_each_mutant_still_has_something_to_change(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "tests" / "mutation"), *sys.path])
    from check import load_mutants

    mutants = load_mutants()
    assert len(mutants) >= MUTANTS_MIN
    texts = {m.path: (ROOT / m.path).read_text() for m in mutants if (ROOT / m.path).exists()}
    lost = [m.name for m in mutants if texts.get(m.path, "").count(m.old) != 1]
    assert lost == [], (
        "write their text anew in tests/mutation/mutants.toml, or test something else"
    )
    files = {path for m in mutants for path in m.tests}
    assert [path for path in sorted(files) if not (ROOT / path).exists()] == []
    assert [m.name for m in mutants if m.old == m.new] == []
