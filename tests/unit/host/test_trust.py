"""Root believes only files that nobody else can have written."""

import os

import pytest

from gpuops.errors import ConfigError
from gpuops.host.trust import refuse_foreign, refuse_foreign_file

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "suites"
    folder.mkdir(mode=0o755)
    (folder / "site.toml").write_text("")
    (folder / "site.toml").chmod(0o644)
    return folder


@needs_root
def test_roots_own_closed_files_are_believed(folder):
    refuse_foreign(folder, uid=0)


@needs_root
@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_file_that_others_may_write_is_named(folder, mode):
    (folder / "site.toml").chmod(mode)

    with pytest.raises(ConfigError, match=r"site\.toml.*mode"):
        refuse_foreign(folder, uid=0)


@needs_root
def test_a_file_of_somebody_else_is_named(folder):
    os.chown(folder / "site.toml", 12345, 0)

    with pytest.raises(ConfigError, match=r"site\.toml: it belongs to uid 12345"):
        refuse_foreign(folder, uid=0)


def test_a_user_may_believe_anything(folder):
    (folder / "site.toml").chmod(0o666)

    refuse_foreign(folder, uid=1000)


def test_a_folder_that_is_not_there_is_no_harm(tmp_path):
    refuse_foreign(tmp_path / "none", uid=0)


@needs_root
def test_a_closed_file_in_a_closed_folder_or_in_tmp_is_believed(folder):
    refuse_foreign_file(folder / "site.toml", uid=0)
    folder.chmod(0o1777)
    refuse_foreign_file(folder / "site.toml", uid=0)


@needs_root
def test_a_folder_in_which_others_may_replace_the_file_is_named(folder):
    folder.chmod(0o777)

    with pytest.raises(ConfigError, match=r"suites: it belongs to uid 0 with mode 777"):
        refuse_foreign_file(folder / "site.toml", uid=0)


@needs_root
def test_a_link_is_judged_by_the_file_it_leads_to(folder, tmp_path):
    (folder / "site.toml").chmod(0o666)
    (tmp_path / "link.toml").symlink_to(folder / "site.toml")

    with pytest.raises(ConfigError, match=r"root does not read .*link\.toml"):
        refuse_foreign_file(tmp_path / "link.toml", uid=0)


def test_a_user_may_believe_any_one_file(folder):
    (folder / "site.toml").chmod(0o666)

    refuse_foreign_file(folder / "site.toml", uid=1000)
