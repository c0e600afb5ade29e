"""What another user could have put in our way, and what is ours."""

import pytest

from gpuops.host.trust import why_not_ours


def test_a_directory_that_is_missing_is_made_for_us_alone(tmp_path):
    assert why_not_ours(tmp_path / "a" / "b", private=True) is None
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_a_link_is_refused_even_to_a_directory_of_ours(tmp_path):
    (tmp_path / "ours").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "ours")

    assert why_not_ours(tmp_path / "link", private=True) == "it is not a directory"


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_one_that_others_may_write_is_not_private(tmp_path, mode):
    tmp_path.chmod(mode)

    assert "other users may write" in why_not_ours(tmp_path, private=True)
    assert why_not_ours(tmp_path, private=False) is None


def test_a_file_in_the_way_is_said(tmp_path):
    (tmp_path / "file").touch()

    assert why_not_ours(tmp_path / "file" / "x", private=True) == "Not a directory"
