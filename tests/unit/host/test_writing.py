"""Folders are written in, and nothing is left behind."""

import os

from gpuops.host.storage.write_test import read_writes, write_and_remove


def test_a_folder_that_can_be_written_is_left_as_it_was(tmp_path):
    (tmp_path / "scratch").mkdir()
    (answer,) = read_writes(tmp_path, 20, ("/scratch",)).answers

    assert (answer.path, answer.error, answer.silent) == ("/scratch", None, None)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_what_went_wrong_is_said_by_its_errno_and_folder(tmp_path):
    (tmp_path / "file").touch()
    gone, file = read_writes(tmp_path, 20, ("/none", "/file")).answers[::-1]

    assert (gone.path, gone.error) == ("/none", "ENOENT")
    assert (file.path, file.error) == ("/file", "ENOTDIR")


def test_what_a_killed_run_left_behind_is_taken_away(tmp_path):
    left = tmp_path / f".gpuops-writes-{os.uname().nodename}"
    left.touch()
    write_and_remove(tmp_path)

    assert not left.exists()


def test_a_link_in_our_files_place_is_not_followed(tmp_path):
    target = tmp_path / "precious"
    target.write_text("keep me")
    (tmp_path / f".gpuops-writes-{os.uname().nodename}").symlink_to(target)
    write_and_remove(tmp_path)

    assert target.read_text() == "keep me"


def test_nothing_is_asked_where_nothing_is_named(tmp_path):
    assert read_writes(tmp_path, 20, ()).answers == ()
