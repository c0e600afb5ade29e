"""Who was started by whom."""

import os

from gpuops.host.process.inspect import descendants


def stat(root, pid, parent, name="python"):
    folder = root / f"proc/{pid}"
    folder.mkdir(parents=True)
    (folder / "stat").write_text(f"{pid} ({name}) S {parent} 1 1 0 -1 0")


def test_children_and_theirs_come_in_order(tmp_path):
    for pid, parent in ((1, 0), (10, 1), (11, 10), (12, 11), (13, 10), (20, 1)):
        stat(tmp_path, pid, parent)

    assert sorted(descendants(10, tmp_path)) == [11, 12, 13]
    assert descendants(10, tmp_path).index(11) < descendants(10, tmp_path).index(12)
    assert descendants(12, tmp_path) == []


def test_a_name_cannot_pretend_another_parent(tmp_path):
    stat(tmp_path, 5, 1, "x) S 10 (y")

    assert descendants(10, tmp_path) == []
    assert descendants(1, tmp_path) == [5]


def test_what_cannot_be_read_is_left_out(tmp_path):
    stat(tmp_path, 11, 10)
    (tmp_path / "proc/12").mkdir()
    (tmp_path / "proc/13").mkdir()
    (tmp_path / "proc/13/stat").write_text("rubbish")

    assert descendants(10, tmp_path) == [11]
    assert descendants(10, tmp_path / "nothing") == []


def test_on_this_machine():
    assert os.getpid() in descendants(os.getppid())
