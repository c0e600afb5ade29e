"""Secrets never get into a store; what is no secret stays readable."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.scrub import TEXT_MAX, scrub, scrub_lines, scrub_value


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("postgresql+psycopg://ada:hunter2@db/x", "hunter2"),
        ("postgresql://ada:p@ss/w:rd@db:5432/x failed", "p@ss/w:rd"),
        ("redis://:hunter2@cache", "hunter2"),
        ("HF_TOKEN=abcdefgh1", "abcdefgh1"),
        ("export WANDB_API_KEY='0123abcd'", "0123abcd"),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG", "wJalrXUtnFEMI"),
        ("AWS_ACCESS_KEY_ID: AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE"),
        ("password=123456", "123456"),
        ('{"password": "hunter2"}', "hunter2"),
        ("PGPASSWORD=hunter2 psql", "hunter2"),
        ("Authorization: Bearer abc.def-ghi", "abc.def-ghi"),
        ("authorization: Basic YWxhZGRpbg==", "YWxhZGRpbg"),
        ("curl -H 'bearer abcdefgh12345'", "abcdefgh12345"),
        ("key sk-abcdefghijklmnopqrstuv is bad", "sk-abcdefghijklmnopqrstuv"),
        ("hf_abcdefghijklmnopqrst", "hf_abcdefghijklmnopqrst"),
        ("ghp_abcdefghijklmnopqrstuvwxyz0123", "ghp_abcdefghijklmnopqrstuvwxyz0123"),
        ("https://b.s3.test/k?X-Amz-Signature=deadbeef&x=1", "deadbeef"),
        ("unrecognized arguments: --password hunter2", "hunter2"),
        ("prog --hf-token abc --lr 1", "abc"),
        ("prog --db_passwd 'hunter2' x", "hunter2"),
        ("prog --api-key abc123", "abc123"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----", "MIIEow"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdefghijk", "eyJzdWIiOiIxMjM0In0"),
    ],
)
def test_a_secret_is_taken_out(text, secret):
    assert secret not in scrub(text)
    assert "***" in scrub(text)


@pytest.mark.parametrize(
    "text",
    [
        "step 12: tokens=4096 tokens/s: 1234.5 pad_token_id=0",
        "max_token: 512",
        "--max-token 512 --tokenizer bpe --token-file f --password -x",
        "https://example.org:8080/path?x=1",
        "sqlite:////var/lib/gpuops/gpuops.db",
        "postgresql://ada@db/x",
        "RuntimeError: NCCL error in: ../torch/csrc/ProcessGroupNCCL.cpp:1275",
        "Connection closed by peer [127.0.0.1]:29500",
        "secretary of state",
    ],
)
def test_what_is_no_secret_stays(text):
    assert scrub(text) == text


def test_what_stands_beside_a_secret_tells_it():
    value = {
        "env": {"MY_API_KEY": "abc", "HOME": "/root", "n_tokens": 5},
        "command": ["train.py", "--api-key", "abc", "--lr", "0.1", "--wandb-token=abc"],
        "nested": [{"password": "abc"}],
    }

    assert scrub_value(value) == {
        "env": {"MY_API_KEY": "***", "HOME": "/root", "n_tokens": 5},
        "command": ["train.py", "--api-key", "***", "--lr", "0.1", "--wandb-token=***"],
        "nested": [{"password": "***"}],
    }


def test_values_nested_without_end_are_cut():
    deep: list = []
    for _ in range(200):
        deep = [deep]

    assert str(scrub_value(deep)).count("[") < 30


@pytest.mark.parametrize(
    "text",
    [
        "password" * 10_000,
        "://a:" * 10_000,
        "a-" * 20_000,
        "-----BEGIN PRIVATE KEY-----" * 200,
        "bearer " * 10_000,
        "token=\"'" * 10_000,
        "eyJ" + "a" * 50_000,
        "sk-" * 20_000,
    ],
)
def test_hostile_text_costs_a_bounded_time(text):
    start = time.process_time()

    scrub(text)

    assert time.process_time() - start < 5


@given(st.text())
def test_scrubbing_twice_changes_nothing_more(text):
    assert scrub(scrub(text)) == scrub(text)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://app:s3cret@db.example/gpuops",
        "postgresql+psycopg://app:s3cret@/gpuops?host=/run",
        "postgresql+psycopg://app:p%40s3cret@db:5432/gpuops",
        "postgresql+psycopg://db/gpuops?user=app&password=s3cret&port=1",
        "postgresql+psycopg://:s3cret@db/x",
        "postgresql+psycopg://app:s3cret@with@at@db/x",
    ],
)
def test_no_password_survives_in_a_store_url(url):
    assert "s3cret" not in scrub(url)
    assert scrub(url).startswith("postgresql+psycopg://")


def test_a_store_url_without_a_secret_stays_as_it_is():
    for url in ("sqlite:////var/lib/gpuops/gpuops.db", "postgresql+psycopg://app@db:5432/x"):
        assert scrub(url) == url


KEY = ("-----BEGIN RSA PRIVATE KEY-----", "MIIEow", "Qw==", "-----END RSA PRIVATE KEY-----")


def test_a_key_across_lines_is_taken_out_and_every_line_stays_a_line():
    lines = ["before", *KEY, "after password=hunter2", "two\nlines"]

    assert scrub_lines(lines) == [
        "before",
        KEY[0],
        "***",
        "***",
        KEY[3],
        "after password=***",
        "two\nlines",
    ]


def test_a_key_without_an_end_is_taken_out():
    assert scrub_lines([*KEY[:3]]) == [KEY[0], "***", "***"]


def test_a_key_across_the_items_of_a_list_is_taken_out_among_other_values():
    assert scrub_value({"log_tail": ["a\nb", KEY[0], 3, KEY[1], None, KEY[3], "c"]}) == {
        "log_tail": ["a\nb", KEY[0], 3, "***", None, KEY[3], "c"]
    }


@pytest.mark.parametrize("unit", ["-----BEGIN PRIVATE KEY-----", "://", "eyJ-", "password="])
def test_no_text_takes_long(unit):
    text = unit * (4 * TEXT_MAX // len(unit))
    start = time.process_time()
    scrub(text)

    assert time.process_time() - start < 1.5


def test_text_beyond_the_limit_is_dropped():
    assert len(scrub("x" * (TEXT_MAX + 5))) == TEXT_MAX + 1
