"""Settings: flag > environment > file > default, and nothing unknown."""

import os
from pathlib import Path

import pytest

from gpuops.config.resolve import SETTINGS, TOML_BYTES_MAX, read_toml, resolve
from gpuops.errors import ConfigError

HOME = {"HOME": "/home/ann"}


def settings(flags=None, env=None, file=None, is_root=False):
    return resolve(flags or {}, {**HOME, **(env or {})}, config_file=file, is_root=is_root)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "gpuops.toml"
    path.write_text('[store]\nurl = "sqlite:////from/file.db"\n[check]\ngpus_expected = 8\n')
    return path


def test_each_place_beats_the_less_specific_one(file):
    env = {"GPUOPS_STORE": "sqlite:////from/env.db"}
    flags = {"store.url": "sqlite:////from/flag.db"}

    assert settings().values["store.url"].origin == "default"
    assert settings(file=file).store_url == "sqlite:////from/file.db"
    assert settings(env=env, file=file).store_url == "sqlite:////from/env.db"
    assert settings(flags, env, file).store_url == "sqlite:////from/flag.db"
    assert settings(flags, env, file).values["store.url"].origin == "flag"
    assert settings(env=env).values["store.url"].origin == "environment GPUOPS_STORE"
    assert settings(file=file).gpus_expected == 8


def test_a_flag_that_was_not_given_counts_for_nothing(file):
    assert settings({"store.url": None}, file=file).store_url == "sqlite:////from/file.db"


def test_a_user_keeps_state_under_xdg_and_root_under_var():
    user, root = settings(), settings(is_root=True)

    assert user.store_url == "sqlite:////home/ann/.local/state/gpuops/gpuops.db"
    assert settings(env={"XDG_STATE_HOME": "/s"}).spool_dir == Path("/s/gpuops/spool")
    assert root.store_url == "sqlite:////var/lib/gpuops/gpuops.db"
    assert root.spool_dir == Path("/var/spool/gpuops")


def test_an_unknown_key_lists_the_valid_ones_and_the_likely_one(tmp_path):
    path = tmp_path / "gpuops.toml"
    path.write_text('[store]\nurll = "sqlite://"\n')

    with pytest.raises(ConfigError, match=r"unknown key 'store\.urll'") as caught:
        settings(file=path)

    assert "did you mean 'store.url'?" in str(caught.value)
    assert all(item.key in str(caught.value) for item in SETTINGS)


def test_malformed_toml_names_the_file_and_the_place(tmp_path):
    path = tmp_path / "gpuops.toml"
    path.write_text("[store\n")

    with pytest.raises(ConfigError, match=rf"{path}.*line 1"):
        settings(file=path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a = " + b"[" * 50_000, "it is nested too deeply"),
        (b"\xff\xfe", "invalid start byte"),
        (b"#" * (TOML_BYTES_MAX + 1), f"it has more than {TOML_BYTES_MAX} bytes"),
    ],
)
def test_a_file_that_no_one_can_have_meant_is_one_clear_error(tmp_path, content, message):
    path = tmp_path / "gpuops.toml"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=rf"cannot read {path} as TOML: .*{message}"):
        read_toml(path)


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo.toml")

    for path in (tmp_path / "fifo.toml", Path(os.devnull)):
        with pytest.raises(ConfigError, match="it is not a file"):
            read_toml(path)
    with pytest.raises(ConfigError, match="Is a directory"):
        read_toml(tmp_path)


def test_a_file_that_was_named_must_exist(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        settings(file=tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="does not exist"):
        settings(env={"GPUOPS_CONFIG": str(tmp_path / "none.toml")})


def test_the_users_own_file_is_found_but_root_does_not_read_it(tmp_path):
    path = tmp_path / "gpuops" / "gpuops.toml"
    path.parent.mkdir()
    path.write_text('[cluster]\nname = "blue"\n')
    env = {"XDG_CONFIG_HOME": str(tmp_path)}

    assert settings(env=env).cluster == "blue"
    assert settings(env=env, is_root=True).cluster == "default"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"GPUOPS_GPUS_EXPECTED": "many"}, "check.gpus_expected = 'many'"),
        ({"GPUOPS_SPOOL_BYTES_MAX": "big"}, "spool.bytes_max = 'big'"),
        ({"GPUOPS_DISABLE": "maybe"}, "worker.disable = 'maybe'"),
        ({"GPUOPS_MODE": "enforced"}, "gate.mode = 'enforced'.*expected one of observe, enforce"),
        ({"GPUOPS_FUSE_NODES": "0"}, "gate.fuse_nodes = '0'.*of nodes from 1 to 65536"),
        ({"GPUOPS_PASSES_TO_RESUME": "two"}, "gate.passes_to_resume = 'two'"),
        ({"GPUOPS_RESUMES_MAX_PER_DAY": "-1"}, "gate.resumes_max_per_day = '-1'"),
        ({"GPUOPS_BURNIN_TIER": "5m"}, "burnin.tier = '5m'.*expected one of 10m, 30m, 60m"),
        ({"GPUOPS_BURNIN_PEERS_WARN_PERCENT": "0"}, "burnin.peers_warn_percent.*above 0 and below"),
        ({"GPUOPS_BURNIN_PEERS_FAIL_PERCENT": "nan"}, "burnin.peers_fail_percent.*above 0 and"),
        ({"GPUOPS_BURNIN_PEERS_FAIL_PERCENT": "a lot"}, "burnin.peers_fail_percent.*percentage"),
        ({"GPUOPS_BURNIN_SWEEP_MAX_AGE": "31d"}, "burnin.sweep_max_age = .31d.*up to 2.592e"),
        ({"GPUOPS_FUSE_WINDOW_S": "0"}, "gate.fuse_window_s = '0'.*up to 604800"),
        ({"GPUOPS_FUSE_WINDOW_S": "8d"}, "gate.fuse_window_s = '8d'.*up to 604800"),
        ({"GPUOPS_PERMIT_DEADLINE_S": "61"}, "gate.permit_deadline_s = '61'.*up to 60"),
    ],
)
def test_a_bad_value_names_the_key_the_value_and_its_origin(env, message):
    with pytest.raises(ConfigError, match=message) as caught:
        settings(env=env)

    assert f"environment {next(iter(env))}" in str(caught.value)


def test_the_gate_only_observes_unless_it_is_told_to_enforce(tmp_path):
    path = tmp_path / "gpuops.toml"
    path.write_text('[gate]\nmode = "enforce"\nfuse_window_s = 300\n[check]\nprofile = "h100"\n')

    told = settings(file=path, env={"GPUOPS_PERMIT_DEADLINE_S": "250ms"})

    assert settings().mode == "observe"
    assert (settings().fuse_nodes, settings().max_drained) == (None, None)
    assert settings(env={"GPUOPS_MAX_DRAINED": "40"}).max_drained == 40
    assert settings().passes_to_resume == 2
    assert settings().resumes_max_per_day == 3
    assert (settings().fuse_window_s, settings().permit_deadline_s) == (600, 1)
    assert (told.mode, told.fuse_window_s, told.profile) == ("enforce", 300, "h100")
    assert told.permit_deadline_s == 0.25


def test_a_bad_value_in_the_file_is_said_even_where_the_environment_wins(tmp_path):
    path = tmp_path / "gpuops.toml"
    path.write_text("[store]\nurl = 3\n")

    with pytest.raises(ConfigError, match=r"store\.url = '3'"):
        settings(env={"GPUOPS_STORE": "sqlite:////x.db"}, file=path)


def test_a_folder_is_no_configuration_file(tmp_path):
    with pytest.raises(ConfigError, match="is not a file"):
        settings(file=tmp_path)
