"""Root believes only files that nobody else can have written."""

import os

import pytest

from gpuops.errors import ConfigError
from gpuops.host.trust import check_folders, refuse_foreign, refuse_foreign_file

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

    with pytest.raises(ConfigError, match=r"site\.toml: .*suites belongs to uid 0 with mode 777"):
        refuse_foreign_file(folder / "site.toml", uid=0)


@needs_root
def test_a_link_is_judged_by_the_file_it_leads_to(folder, tmp_path):
    (folder / "site.toml").chmod(0o666)
    (tmp_path / "link.toml").symlink_to(folder / "site.toml")

    with pytest.raises(ConfigError, match=r"root does not read .*link\.toml"):
        refuse_foreign_file(tmp_path / "link.toml", uid=0)


@needs_root
@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_a_folder_far_above_that_others_may_write_is_named(tmp_path, mode):
    deep = tmp_path / "open" / "a" / "b"
    deep.mkdir(parents=True)
    (deep / "site.toml").write_text("")
    (tmp_path / "open").chmod(mode)

    for refused in (refuse_foreign, refuse_foreign_file):
        with pytest.raises(ConfigError, match=rf"/open belongs to uid 0 with mode {mode:o}"):
            refused(deep if refused is refuse_foreign else deep / "site.toml", uid=0)


@needs_root
def test_a_folder_far_above_that_is_somebody_elses_is_named(tmp_path):
    deep = tmp_path / "home" / "a"
    deep.mkdir(parents=True)
    os.chown(tmp_path / "home", 12345, 0)

    with pytest.raises(ConfigError, match=r"a: /.*/home belongs to uid 12345 with mode 755"):
        refuse_foreign(deep, uid=0)


@needs_root
def test_every_step_of_a_chain_of_links_is_judged(folder, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open" / "second").symlink_to("../suites/site.toml")
    (tmp_path / "first").symlink_to("open/second")

    with pytest.raises(ConfigError, match=r"first: /.*/open belongs to uid 0 with mode 777"):
        refuse_foreign_file(tmp_path / "first", uid=0)


@needs_root
def test_a_link_of_somebody_else_is_named_though_it_leads_to_roots_own(folder, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(folder / "site.toml")
    os.chown(link, 12345, 0, follow_symlinks=False)

    with pytest.raises(ConfigError, match=r"link: it belongs to uid 12345"):
        refuse_foreign_file(link, uid=0)


@needs_root
def test_links_over_roots_own_folders_are_believed(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    (folder / "again.toml").symlink_to("../link/./site.toml")

    refuse_foreign(tmp_path / "link", uid=0)


@needs_root
def test_links_in_a_circle_are_refused(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")

    with pytest.raises(ConfigError, match="a loop of links"):
        refuse_foreign_file(tmp_path / "a", uid=0)


@needs_root
def test_a_link_to_where_others_could_put_a_file_is_refused(folder, tmp_path):
    (tmp_path / "drop").mkdir()
    (tmp_path / "drop").chmod(0o1777)
    (folder / "later.toml").symlink_to(tmp_path / "drop" / "later.toml")

    with pytest.raises(ConfigError, match=r"later\.toml: /.*/drop belongs to uid 0 with mode 1777"):
        refuse_foreign(folder, uid=0)


@needs_root
def test_a_file_of_somebody_else_in_a_sticky_folder_is_refused(folder):
    folder.chmod(0o1777)
    os.chown(folder / "site.toml", 12345, 0)

    with pytest.raises(ConfigError, match=r"site\.toml: it belongs to uid 12345"):
        refuse_foreign_file(folder / "site.toml", uid=0)


@needs_root
@pytest.mark.parametrize(
    "name", ["suites", "rules", "profiles", "xid", "checks.d", "silences.toml"]
)
def test_nothing_in_the_sites_folder_may_be_somebody_elses(tmp_path, name):
    tmp_path.chmod(0o755)
    if name.endswith(".toml"):
        (tmp_path / name).write_text("")
        mine = tmp_path / name
    else:
        (tmp_path / name).mkdir()
        mine = tmp_path / name / "x"
        mine.write_text("")
    check_folders(tmp_path, uid=0)
    os.chown(mine, 12345, 0)

    with pytest.raises(ConfigError, match=rf"{mine}: it belongs to uid 12345"):
        check_folders(tmp_path, uid=0)


@needs_root
def test_whoever_collects_mistakes_gets_every_foreign_file(folder):
    mistakes = []
    for name in ("a.toml", "b.toml"):
        (folder / name).write_text("")
        (folder / name).chmod(0o666)

    refuse_foreign(folder, uid=0, on_error=mistakes.append)

    assert [str(item).split(":")[0][-6:] for item in mistakes] == ["a.toml", "b.toml"]


def test_a_sites_folder_that_is_named_must_be_there(tmp_path):
    with pytest.raises(ConfigError, match=r"none \(check\.site_dir\) does not exist"):
        check_folders(tmp_path / "none", uid=1000)


def test_the_sites_folders_come_after_the_shipped_ones(tmp_path):
    (tmp_path / "silences.toml").write_text("")

    site, shipped = check_folders(tmp_path, uid=1000), check_folders(None, uid=1000)

    assert site.profiles == (*shipped.profiles, tmp_path / "profiles")
    assert site.xid == (*shipped.xid, tmp_path / "xid")
    assert (site.site_checks, site.silences) == (
        tmp_path / "checks.d",
        (tmp_path / "silences.toml",),
    )
    assert (shipped.site_checks, shipped.silences) == (None, ())


def test_a_user_may_believe_any_one_file(folder):
    (folder / "site.toml").chmod(0o666)

    refuse_foreign_file(folder / "site.toml", uid=1000)
