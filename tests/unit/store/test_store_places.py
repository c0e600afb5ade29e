"""A SQLite store where none can be is refused in words, and nothing is made on the way."""

import json
import os

import pytest
from support.command import command_here

from gpuops.errors import StoreUnreachableError
from gpuops.store.engine import open_store
from gpuops.store.migrate import upgrade_store


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    return command_here(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("mode", ["read", "write"])
def test_a_directory_is_no_store(tmp_path, mode):
    with pytest.raises(StoreUnreachableError, match="it is a directory; name a file in it"):
        open_store(f"sqlite:///{tmp_path}", mode=mode)


def test_an_upgrade_makes_no_directory_for_a_store_that_was_named(call, tmp_path):
    code, _, err = call("db", "upgrade", "--store", f"sqlite:///{tmp_path}/typo/gpuops.db")

    assert code == 75
    assert f"the directory {tmp_path}/typo does not exist" in err
    assert not (tmp_path / "typo").exists()


def test_the_default_store_is_given_its_directory(tmp_path):
    upgrade_store(f"sqlite:///{tmp_path}/state/gpuops.db")

    assert (tmp_path / "state" / "gpuops.db").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("{}/file/deep/gpuops.db", "{}/file is not a directory"),
        ("{}", "it is a directory"),
        pytest.param(
            "{}/closed/gpuops.db",
            "this user may not create a file in {}/closed",
            marks=pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere"),
        ),
    ],
)
def test_status_says_where_no_store_can_be(call, tmp_path, place, words):
    (tmp_path / "file").write_text("")
    (tmp_path / "closed").mkdir(mode=0o500)
    code, out, _ = call("db", "status", "--json", "--store", f"sqlite:///{place.format(tmp_path)}")
    store = json.loads(out)["store"]

    assert code == 75
    assert store["state"] == "unreachable"
    assert words.format(tmp_path) in store["advice"]


def test_status_makes_nothing_where_a_store_can_be(call, tmp_path):
    code, out, _ = call("db", "status", "--store", f"sqlite:///{tmp_path}/new/gpuops.db")

    assert code == 0
    assert "created on first use" in out
    assert not (tmp_path / "new").exists()
