"""What the settings of ``gpuops run`` mean, and what is refused."""

import pytest

from gpuops.config import schema
from gpuops.config.resolve import resolve
from gpuops.errors import ConfigError


@pytest.mark.parametrize(
    ("read", "text", "meant"),
    [
        (schema.parse_restarts, "3", (3, None)),
        (schema.parse_restarts, "0", (0, None)),
        (schema.parse_restarts, "10/6h", (10, 21600.0)),
        (schema.parse_spare_count, "0", 0),
        (schema.parse_spare_count, "2", 2),
        (schema.parse_hang_timeout, "auto", None),
        (schema.parse_hang_timeout, "off", 0.0),
        (schema.parse_hang_timeout, "10", 10.0),
        (schema.parse_hang_timeout, "5m", 300.0),
        (schema.parse_switch, "off", False),
        (schema.parse_grow_after, "never", None),
        (schema.parse_grow_after, "90s", 90.0),
        (schema.parse_http_address, "off", ("127.0.0.1", None)),
        (schema.parse_http_address, "9100", ("127.0.0.1", 9100)),
        (schema.parse_http_address, "0.0.0.0:0", ("0.0.0.0", 0)),
        (schema.parse_http_address, "[::1]:80", ("::1", 80)),
        (schema.parse_exit_codes, "", frozenset()),
        (schema.parse_exit_codes, "16, 17", frozenset({16, 17})),
        (schema.parse_function_name, "site.policy:decide", "site.policy:decide"),
        (schema.parse_checkpoint_mode, "auto", True),
        (schema.parse_checkpoint_mode, "off", False),
        (schema.parse_directory, "s3://bucket/x", "s3://bucket/x"),
        (schema.parse_duration, "2m", 120.0),
    ],
)
def test_a_text_is_understood(read, text, meant):
    assert read(text) == meant


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (schema.parse_restarts, "many", "10/6h"),
        (schema.parse_restarts, "-1", "10/6h"),
        (schema.parse_restarts, "3/", "a time"),
        (schema.parse_restarts, "3/0s", "a time"),
        (
            schema.parse_restarts,
            "10/6",
            "no two restarts fit into 6 s; expected a window as in 10/6h",
        ),
        (schema.parse_node_count, "0", "at least 1"),
        (schema.parse_spare_count, "-1", "at least 1"),
        (schema.parse_on_exhausted, "stop", "shrink or requeue"),
        (
            schema.parse_hang_timeout,
            "soon",
            "expected a time as in 90, 90s or 2h, auto or off",
        ),
        (schema.parse_hang_timeout, "0", "auto"),
        (schema.parse_switch, "maybe", "on or off"),
        (schema.parse_grow_after, "0", "never"),
        (schema.parse_http_address, "host:80", "not an IP address"),
        (schema.parse_http_address, "70000", "PORT"),
        (schema.parse_exit_codes, "16,256", "1 to 255"),
        (schema.parse_exit_codes, "0", "1 to 255"),
        (schema.parse_function_name, "policy", "policy:decide"),
        (schema.parse_function_name, "os;x:y", "policy:decide"),
        (schema.parse_absolute_path, "token", "absolute"),
        (schema.parse_checkpoint_mode, "on", "auto or off"),
        (schema.parse_directory, " ", "a directory"),
        (schema.parse_directory, "a\0b", "a directory"),
        (schema.parse_duration, "0", "a time"),
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
    for setting in (*schema.RUN_SETTINGS, *schema.CHECKPOINT_SETTINGS):
        default = setting.default({}, False)
        assert default is None or setting.parse(default) == default


def test_the_table_of_checkpoints_is_one_of_its_own(tmp_path):
    table = '[checkpoint]\nkeeper = "off"\ndirectory = "/scratch/ckpt"\nlease = 30\n'

    values = settings({"GPUOPS_CKPT_LAST_SAVE": "1m"}, table, tmp_path).values

    assert values["checkpoint.keeper"].value == "off"
    assert values["checkpoint.directory"].value == "/scratch/ckpt"
    assert (values["checkpoint.lease"].value, values["checkpoint.last_save"].value) == ("30", "1m")
