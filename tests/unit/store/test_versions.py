"""Whether a schema fits is judged from two numbers."""

import subprocess
import sys

import pytest
from alembic.script import ScriptDirectory

from gpuops.store.engine import SchemaFit, compare_revision, memory_store
from gpuops.store.migrate import alembic_config
from gpuops.store.schema import REVISION


@pytest.mark.parametrize(
    ("found", "has_tables", "fit"),
    [
        (None, False, SchemaFit.EMPTY),
        (None, True, SchemaFit.FOREIGN),
        ("0005", True, SchemaFit.CURRENT),
        ("0001", True, SchemaFit.OLDER),
        ("0004", True, SchemaFit.OLDER),
        ("0002", True, SchemaFit.UNKNOWN),  # of a pre-release
        ("0006", True, SchemaFit.UNKNOWN),
        ("0010", True, SchemaFit.UNKNOWN),
        ("from-the-future", True, SchemaFit.UNKNOWN),
    ],
)
def test_revisions_are_numbers_in_one_line(found, has_tables, fit):
    assert compare_revision(found, has_tables=has_tables, code_revision="0005") is fit


def test_the_code_knows_its_newest_migration():
    with memory_store() as store, store.begin() as connection:
        script = ScriptDirectory.from_config(alembic_config(connection))

    assert script.get_heads() == [REVISION]


def test_recording_does_not_import_the_database_library():
    code = (
        "import sys, gpuops.store.spool.record, gpuops.store.spool.write, "
        "gpuops.store.spool.record;"
        "print([m for m in sys.modules if m.startswith(('sqlalchemy', 'alembic', 'torch'))])"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )

    assert done.stdout.strip() == "[]"
