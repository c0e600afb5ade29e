"""Files that are there one moment and gone the next."""

from gpuops.host.trust import entries_of, number_of, text_of


def test_what_cannot_be_read_is_none(tmp_path):
    assert text_of(tmp_path / "gone") is None
    assert text_of(tmp_path) is None
    assert number_of(tmp_path / "gone") is None
    assert entries_of(tmp_path / "gone") == []


def test_text_and_numbers_are_read_without_the_space_around(tmp_path):
    file = tmp_path / "value"
    file.write_bytes(b" 0x10de\n")

    assert text_of(file) == "0x10de"
    assert number_of(file, 16) == 0x10DE
    assert number_of(file) is None
    file.write_bytes(b"\xff\n")
    assert text_of(file) == "\ufffd"


def test_entries_come_by_name(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / name).touch()

    assert [path.name for path in entries_of(tmp_path)] == ["a", "b", "c"]
