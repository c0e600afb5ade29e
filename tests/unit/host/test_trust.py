"""Root believes only files that nobody else can have written."""

import os

import pytest

from gpuops.errors import ConfigError
from gpuops.host.trust import refuse_foreign

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
