"""What dcgmi prints, in the layouts of DCGM 3 and 4."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_root import FakeRoot

from gpuops.errors import ProbeError
from gpuops.host.dcgm import DcgmDiagnostic, DcgmError, parse_diag, read_dcgm

# Field names as DCGM 4 prints them; persistence mode is off on two GPUs of two.
DCGM_4 = {
    "DCGM Diagnostic": {
        "test_categories": [
            {
                "category": "Deployment",
                "tests": [
                    {
                        "name": "software",
                        "results": [
                            {
                                "entity_group": "GPU",
                                "entity_group_id": 1,
                                "entity_id": gpu,
                                "status": "Fail",
                                "warnings": [
                                    {
                                        "error_category": 8,
                                        "error_id": 29,
                                        "error_severity": 5,
                                        "warning": f"Persistence mode for GPU {gpu} is disabled.",
                                    }
                                ],
                            }
                            for gpu in (0, 1)
                        ],
                        "test_summary": {"status": "Fail"},
                    }
                ],
            },
            {
                "category": "Hardware",
                "tests": [
                    {
                        "name": "memory",
                        "results": [
                            {"entity_group": "GPU", "entity_id": 0, "status": "Pass"},
                            {"entity_group": "GPU", "entity_id": 1, "status": "Skip"},
                        ],
                        "test_summary": {"status": "Pass"},
                    }
                ],
            },
        ]
    },
    "entity_groups": [{"entity_group": "GPU", "entities": [{"entity_id": 0}]}],
    "metadata": {"DCGM Version": "4.2.3", "Driver Version Detected": "570.148.08"},
}
DCGM_3 = {
    "DCGM GPU Diagnostic": {
        "test_categories": [
            {
                "category": "Integration",
                "tests": [
                    {
                        "name": "PCIe",
                        "results": [
                            {"gpu_id": "0", "status": "Pass", "info": ["GPU to Host: 25 GB/s"]},
                            {
                                "gpu_ids": "7",
                                "status": "Fail",
                                "warnings": [
                                    "PCIe replays",
                                    {"warning": "low bandwidth", "error_id": "14"},
                                ],
                            },
                        ],
                    }
                ],
            }
        ],
        "version": "3.3.1",
    }
}


def dcgmi(path, script):
    root = FakeRoot(path)
    root.write("usr/bin/dcgmi", f"#!/bin/sh\n{script}\n")
    (root.path / "usr/bin/dcgmi").chmod(0o755)
    return root.path


def test_the_layout_of_dcgm_4_is_read_to_the_last_entity():
    version, error, results = parse_diag(json.dumps(DCGM_4))

    assert (version, error) == ("4.2.3", None)
    assert [(item.entity, item.test, item.status) for item in results] == [
        ("GPU 0", "software", "fail"),
        ("GPU 1", "software", "fail"),
        ("GPU 0", "memory", "pass"),
        ("GPU 1", "memory", "skip"),
    ]
    assert results[1].errors == (
        DcgmError(text="Persistence mode for GPU 1 is disabled.", code=29, category=8, severity=5),
    )


def test_the_layout_of_dcgm_3_is_read_with_warnings_of_both_forms():
    version, _, (good, bad) = parse_diag(json.dumps(DCGM_3))

    assert (version, good.entity, good.errors) == ("3.3.1", "GPU 0", ())
    assert (bad.entity, bad.status) == ("GPU 7", "fail")
    assert bad.errors == (DcgmError(text="PCIe replays"), DcgmError(text="low bandwidth", code=14))


def test_text_around_the_json_is_left_out():
    text = f"Successfully ran diagnostic for group.\n{json.dumps(DCGM_3)}\n"

    assert parse_diag(text) == parse_diag(json.dumps(DCGM_3))


def test_a_summary_counts_where_it_says_more_than_its_results():
    test = {
        "name": "eud",
        "results": [],
        "test_summary": {"status": "Fail", "warnings": [{"warning": "no EUD", "error_id": 98}]},
    }
    document = {"DCGM Diagnostic": {"test_categories": [{"category": "X", "tests": [test]}]}}
    _, _, (only,) = parse_diag(json.dumps(document))

    assert (only.entity, only.status, only.errors[0].code) == ("all", "fail", 98)


@pytest.mark.parametrize("text", ["", "Error: unable to connect", "{", "[1]", '{"a": }'])
def test_what_is_no_json_is_none(text):
    assert parse_diag(text) is None


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "DCGM Diagnostic",
                        "test_categories",
                        "tests",
                        "results",
                        "warnings",
                        "status",
                        "metadata",
                        "test_summary",
                    ]
                ),
                inner,
                max_size=3,
            )
        ),
        max_leaves=20,
    )
)
def test_any_json_is_read_without_an_error(document):
    parse_diag(json.dumps(document))


def test_what_dcgmi_prints_and_exits_with_is_kept(tmp_path):
    recorded = tmp_path / "recorded.json"
    recorded.write_text(json.dumps(DCGM_4))
    found = read_dcgm(
        dcgmi(tmp_path / "root", f'cat {recorded}; [ "$3" = 1 ] && exit 226'), 20, "1"
    )

    assert (found.installed, found.version, found.exit_code) == (True, "4.2.3", 226)
    assert len(found.results) == 4


def test_without_the_host_engine_its_words_are_the_error(tmp_path):
    script = "echo 'Error: unable to establish a connection to the specified host' >&2; exit 234"
    found = read_dcgm(dcgmi(tmp_path, script), 20, "1")

    assert found.results == ()
    assert found.error.startswith("dcgmi diag exited with code 234: Error: unable to establish")


def test_a_diagnostic_that_hangs_is_a_timeout(tmp_path):
    with pytest.raises(ProbeError, match="gave no answer") as caught:
        read_dcgm(dcgmi(tmp_path, "exec sleep 1000"), 0.9, "1")
    assert caught.value.reason == "timeout"


def test_without_dcgmi_nothing_is_asked(tmp_path):
    assert read_dcgm(tmp_path, 5, "1") == DcgmDiagnostic(installed=False)
