"""What the settings of ``gpuops run`` mean, and what is refused."""

import pytest

from gpuops import config_run
from gpuops.config import resolve
from gpuops.errors import ConfigError


@pytest.mark.parametrize(
    ("read", "text", "meant"),
    [
        (config_run.restarts, "3", (3, None)),
        (config_run.restarts, "0", (0, None)),
        (config_run.restarts, "10/6h", (10, 21600.0)),
        (config_run.spares, "0", 0),
        (config_run.spares, "2", 2),
        (config_run.hang_timeout, "auto", None),
        (config_run.hang_timeout, "off", 0.0),
        (config_run.hang_timeout, "10", 10.0),
        (config_run.hang_timeout, "5m", 300.0),
        (config_run.switch, "off", False),
        (config_run.grow_after, "never", None),
        (config_run.grow_after, "90s", 90.0),
        (config_run.http, "off", ("127.0.0.1", None)),
        (config_run.http, "9100", ("127.0.0.1", 9100)),
        (config_run.http, "0.0.0.0:0", ("0.0.0.0", 0)),
        (config_run.http, "[::1]:80", ("::1", 80)),
        (config_run.exit_codes, "", frozenset()),
        (config_run.exit_codes, "16, 17", frozenset({16, 17})),
        (config_run.decide, "site.policy:decide", "site.policy:decide"),
        (config_run.checkpoints, "auto", True),
        (config_run.checkpoints, "off", False),
        (config_run.directory, "s3://bucket/x", "s3://bucket/x"),
        (config_run.lasting, "2m", 120.0),
    ],
)
def test_a_text_is_understood(read, text, meant):
    assert read(text) == meant


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (config_run.restarts, "many", "10/6h"),
        (config_run.restarts, "-1", "10/6h"),
        (config_run.restarts, "3/", "a time"),
        (config_run.restarts, "3/0s", "a time"),
        (config_run.restarts, "10/6", "no two restarts fall into 6 s; a time as in 10/6h is"),
        (config_run.nodes, "0", "1 at least"),
        (config_run.spares, "-1", "1 at least"),
        (config_run.on_exhausted, "stop", "shrink or requeue"),
        (config_run.hang_timeout, "soon", "a time as in 90, 90s or 2h, auto or off is wanted"),
        (config_run.hang_timeout, "0", "auto"),
        (config_run.switch, "maybe", "on or off"),
        (config_run.grow_after, "0", "never"),
        (config_run.http, "host:80", "not an IP address"),
        (config_run.http, "70000", "PORT"),
        (config_run.exit_codes, "16,256", "1 to 255"),
        (config_run.exit_codes, "0", "1 to 255"),
        (config_run.decide, "policy", "policy:decide"),
        (config_run.decide, "os;x:y", "policy:decide"),
        (config_run.file, "token", "absolute"),
        (config_run.checkpoints, "on", "auto or off"),
        (config_run.directory, " ", "a directory"),
        (config_run.directory, "a\0b", "a directory"),
        (config_run.lasting, "0", "a time"),
    ],
)
def test_a_text_without_meaning_is_refused(read, text, said):
    with pytest.raises(ValueError, match=said):
        read(text)


def settings(env=None, table="", tmp_path=None):
    file = None
    if table:
        file = tmp_path / "gpuops.toml"
        file.write_text(table)
    return resolve({}, env or {}, config_file=file, is_root=False)


def test_the_table_of_a_file_takes_numbers_words_and_lists(tmp_path):
    table = (
        "[run]\nhang_timeout = 30\nhealth_gate = false\nrestart_exit_codes = [16, 17]\n"
        'max_restarts = "10/6h"\n'
    )

    values = settings(table=table, tmp_path=tmp_path).values

    assert values["run.hang_timeout"].value == "30"
    assert values["run.health_gate"].value == "off"
    assert values["run.restart_exit_codes"].value == "16,17"
    assert values["run.max_restarts"].value == "10/6h"
    assert values["run.max_restarts"].origin.startswith("file ")
    assert values["run.spares"].origin == "default"


def test_the_environment_wins_over_the_file(tmp_path):
    found = settings({"GPUOPS_SPARES": "2"}, "[run]\nspares = 1\n", tmp_path).values["run.spares"]

    assert (found.value, found.origin) == ("2", "environment GPUOPS_SPARES")


@pytest.mark.parametrize("line", ["hang_timeout = 'soon'", "spares = -1", "http = {}"])
def test_a_wrong_value_in_the_file_is_named(tmp_path, line):
    with pytest.raises(ConfigError, match=f"run.{line.split()[0]}"):
        settings(table=f"[run]\n{line}\n", tmp_path=tmp_path)


def test_every_default_is_itself_understood():
    for setting in (*config_run.RUN_SETTINGS, *config_run.CHECKPOINT_SETTINGS):
        default = setting.default({}, False)
        assert default is None or setting.parse(default) == default


def test_the_table_of_checkpoints_is_one_of_its_own(tmp_path):
    table = '[checkpoint]\nkeeper = "off"\ndirectory = "/scratch/ckpt"\nlease = 30\n'

    values = settings({"GPUOPS_CKPT_LAST_SAVE": "1m"}, table, tmp_path).values

    assert values["checkpoint.keeper"].value == "off"
    assert values["checkpoint.directory"].value == "/scratch/ckpt"
    assert (values["checkpoint.lease"].value, values["checkpoint.last_save"].value) == ("30", "1m")
