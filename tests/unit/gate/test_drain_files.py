"""The drain record and the verdict: files that decide over a node, so only root's count."""

import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuops.errors import ProbeError, UsageError
from gpuops.gate.drain import DrainRecord, read_drain, write_drain
from gpuops.gate.hook import write_verdict

DRAIN = DrainRecord(
    id="d1",
    node="n1",
    hook="epilog",
    reason="gpuops: fail gpu_lost n1 -> drain",
    check="gpu_lost",
    failure_class="gpu_hw.fell_off_bus",
    t_us=1,
    why="granted",
    replaces=("Epilog error",),
    job_id="17",
)


def test_a_record_comes_back_as_it_was_kept(tmp_path):
    write_drain(tmp_path / "state", DRAIN)

    assert read_drain(tmp_path / "state", uid=0) == DRAIN
    assert stat.S_IMODE((tmp_path / "state" / "drain.json").stat().st_mode) == 0o600


def test_a_drain_that_is_over_leaves_no_record(tmp_path):
    write_drain(tmp_path, DRAIN)
    write_drain(tmp_path, None)
    write_drain(tmp_path, None)

    assert read_drain(tmp_path, uid=0) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is held to root's own files")
def test_root_does_not_believe_a_record_that_others_may_write(tmp_path):
    write_drain(tmp_path, DRAIN)
    (tmp_path / "drain.json").chmod(0o666)

    with pytest.raises(ProbeError, match="root does not read"):
        read_drain(tmp_path, uid=0)


@given(content=st.binary(max_size=200))
def test_a_torn_record_is_an_error_that_names_the_file(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("state")
    (folder / "drain.json").write_bytes(content)

    with pytest.raises(ProbeError, match=r"cannot use the drain record .*drain\.json"):
        read_drain(folder, uid=1)


def test_a_state_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "state").write_text("in the way")

    with pytest.raises(ProbeError, match="cannot write the drain record"):
        write_drain(tmp_path / "state", DRAIN)


def test_a_verdict_is_one_word_in_a_folder_that_is_ours_alone(tmp_path):
    verdict = tmp_path / "verdicts" / "prolog.1234"
    write_verdict(verdict)

    assert verdict.read_text() == "refuse\n"
    assert stat.S_IMODE(verdict.parent.stat().st_mode) == 0o700
    assert [path.name for path in verdict.parent.iterdir()] == ["prolog.1234"]


def test_no_verdict_is_written_where_others_could_write_one(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)

    with pytest.raises(UsageError, match="other users may write into it"):
        write_verdict(tmp_path / "open" / "prolog.1234")


def test_a_folder_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")

    with pytest.raises(UsageError, match="it is not a directory"):
        write_verdict(tmp_path / "link" / "prolog.1234")
