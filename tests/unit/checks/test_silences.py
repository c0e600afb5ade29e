"""Silences: what they cover and until when, and that none is without owner, reason and end."""

from dataclasses import replace

import pytest

from gpuops.checks.core.silence import Silence, apply_silences, expired, load_silences, warnings
from gpuops.errors import ConfigError
from gpuops.model import Entity, EntityKind, FailureClass, Finding, Status, UnknownReason
from gpuops.units import parse_iso_utc

NOW_US = parse_iso_utc("2026-03-02T12:00:00")
DAY_US = 86_400_000_000
SWAP = Silence(
    check="nic_*",
    node="gpu[001-008]",
    until_us=NOW_US + 1,
    owner="ann",
    reason="cable swap CHG123",
    where="silence 1 of s.toml",
)
FAILED = Finding(
    check="nic_link",
    entity=Entity(EntityKind.NIC, "mlx5_3"),
    status=Status.FAIL,
    message="port down",
    value=0.0,
    source="kernel",
    failure_class=FailureClass.NETWORK_PORT,
)
GOOD = """
[[silence]]
check = "nic_*"
node = "gpu[001-008]"
until = 2026-03-02
owner = "ann"
reason = "cable swap CHG123"
"""


def heard(finding, *silences, node="gpu003"):
    (found,) = apply_silences([finding], silences, node=node, now_us=NOW_US)
    return found


def written(tmp_path, text):
    path = tmp_path / "silences.toml"
    path.write_text(text)
    return [path]


def test_a_silenced_failure_is_a_skip_that_says_who_why_and_what_it_was():
    assert heard(FAILED, SWAP) == replace(
        FAILED,
        status=Status.SKIP,
        failure_class=None,
        message="silenced until 2026-03-02T12:00Z by ann: cable swap CHG123 (was fail: port down)",
    )


@pytest.mark.parametrize(
    "change",
    [
        {"check": "gpu_*"},
        {"node": "gpu[004-008]"},
        {"node": "login*"},
        {"entity": "mlx5_4"},
        {"until_us": NOW_US},
        {"until_us": NOW_US - DAY_US},
    ],
)
def test_what_a_silence_does_not_name_or_no_longer_covers_is_heard(change):
    assert heard(FAILED, replace(SWAP, **change)) is FAILED


def test_one_entity_can_be_silenced_alone():
    assert heard(FAILED, replace(SWAP, entity="mlx5_[!3]")) is FAILED
    assert heard(FAILED, replace(SWAP, entity="mlx5_?")).status is Status.SKIP


def test_warnings_and_unknowns_are_silenced_and_passes_are_left_alone():
    warned = replace(FAILED, status=Status.WARN, failure_class=None)
    unknown = replace(warned, status=Status.UNKNOWN, unknown_reason=UnknownReason.TIMEOUT)
    passed = replace(warned, status=Status.PASS)

    assert heard(warned, SWAP).message.endswith("(was warn: port down)")
    assert heard(unknown, SWAP).unknown_reason is None
    assert heard(passed, SWAP) is passed


def test_the_first_silence_that_covers_a_finding_is_named():
    other = replace(SWAP, owner="bob")

    assert " by bob: " in heard(FAILED, replace(SWAP, node="x"), other, SWAP).message


def test_a_silence_is_what_its_file_says(tmp_path):
    (silence,) = load_silences(written(tmp_path, GOOD))

    assert silence == replace(
        SWAP, until_us=parse_iso_utc("2026-03-03"), where=f"silence 1 of {tmp_path}/silences.toml"
    )


@pytest.mark.parametrize(
    ("until", "end"),
    [
        ("2026-03-02", "2026-03-03T00:00:00"),
        ("2026-03-02T18:00:00Z", "2026-03-02T18:00:00"),
        ("2026-03-02T18:00:00+01:00", "2026-03-02T17:00:00"),
    ],
)
def test_a_date_lasts_to_its_end_and_a_time_to_its_moment(tmp_path, until, end):
    text = GOOD.replace("until = 2026-03-02", f"until = {until}")

    assert load_silences(written(tmp_path, text))[0].until_us == parse_iso_utc(end)


@pytest.mark.parametrize(
    ("line", "instead", "message"),
    [
        ('owner = "ann"', "", "needs owner, a text, got None"),
        ('owner = "ann"', 'owner = " "', "needs owner, a text, got ' '"),
        ('reason = "cable swap CHG123"', "", "needs reason"),
        ("until = 2026-03-02", "", "needs until, a date .* got None"),
        ("until = 2026-03-02", 'until = "2026-03-02"', "without quotes, got '2026-03-02'"),
        ("until = 2026-03-02", "until = 2026-03-02T18:00:00", "a time needs its offset"),
        ("until = 2026-03-02", "until = 9999-12-31", "9999-12-31 is out of range"),
        ("until = 2026-03-02", "until = 0001-01-01", "0001-01-01 is out of range"),
        ("until = 2026-03-02", "until = 0001-01-01T00:00:00+14:00", "is out of range"),
        ('check = "nic_*"', "", "needs check"),
        ('node = "gpu[001-008]"', 'node = "gpu[8-1]"', "node of silence 1 .*runs backwards"),
        ('node = "gpu[001-008]"', 'nodes = "gpu1"', "unknown key 'nodes'; did you mean 'node'"),
        ("[[silence]]", "[silence]", r"written as \[\[silence\]\] tables"),
        ("[[silence]]", "[[silences]]", "unknown key 'silences'; did you mean 'silence'"),
        ("[[silence]]", "[[silence]", "as TOML"),
    ],
)
def test_a_mistake_is_answered_with_what_is_wanted(tmp_path, line, instead, message):
    with pytest.raises(ConfigError, match=message):
        load_silences(written(tmp_path, GOOD.replace(line, instead)))


def test_whoever_collects_mistakes_gets_all_of_them_and_the_good_silences(tmp_path):
    mistakes = []
    broken = GOOD.replace('owner = "ann"', "")

    kept = load_silences(written(tmp_path, broken + GOOD + broken), mistakes.append)

    assert [item.where.split()[1] for item in kept] == ["2"]
    assert [str(item).split()[1] for item in mistakes] == ["1", "3"]


def test_a_silence_that_is_over_is_a_fault_and_a_long_one_is_doubtful():
    over, end_us = replace(SWAP, until_us=NOW_US), NOW_US + 90 * DAY_US

    assert expired(SWAP, NOW_US) == []
    (fault,) = expired(over, NOW_US)
    assert fault == (
        "silence 1 of s.toml (nic_* on gpu[001-008], by ann) ended 2026-03-02T12:00Z:"
        " remove it, or renew it"
    )
    assert warnings(replace(SWAP, check="*", until_us=end_us), NOW_US) == []
    (doubt,) = warnings(replace(SWAP, check="*", until_us=end_us + 1), NOW_US)
    assert doubt.endswith("lasts until 2026-05-31T12:00Z, more than 90 days")


def test_a_silence_of_a_check_that_does_not_exist_is_doubtful():
    mistyped, site = replace(SWAP, check="gpu_cuont"), replace(SWAP, check="site/fan")

    assert warnings(mistyped, NOW_US) == [
        "silence 1 of s.toml: no suite runs a check called 'gpu_cuont'; did you mean 'gpu_count'?"
    ]
    assert warnings(site, NOW_US) == warnings(replace(SWAP, check="gpu_*"), NOW_US) == []
