"""A detached program outlives nothing of ours and holds nothing of ours."""

import os
import sys
import time

from gpuops.host.commands import spawn_detached


def test_a_detached_program_has_its_own_session_and_none_of_our_files(tmp_path):
    note = tmp_path / "note"
    code = (
        "import os; ends = [os.readlink(f'/proc/self/fd/{n}') for n in (0, 1, 2)];"
        f"text = f'{{os.getsid(0) == os.getpid()}} {{set(ends)}} {{os.environ}}';"
        f"open({str(note)!r} + '.part', 'w').write(text);"
        f"os.rename({str(note)!r} + '.part', {str(note)!r})"
    )
    pid = spawn_detached([sys.executable, "-c", code], {"ONLY": "this"})
    os.waitpid(pid, 0)
    deadline = time.monotonic() + 10
    while not note.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)

    assert note.read_text().startswith("True {'/dev/null'}")
    assert "'ONLY': 'this'" in note.read_text()
    assert "HOME" not in note.read_text()
