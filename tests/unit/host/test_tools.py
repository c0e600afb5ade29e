"""Tools of others: their recorded JSON, and programs that fail, print too much or hang."""

import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from gpuops.errors import ProbeError
from gpuops.host.infiniband import Port
from gpuops.host.process.inspect import process_state
from gpuops.host.tools import fio, nccl_tests, nvbandwidth, perftest
from gpuops.host.tools.run import START_S, measure, parse_output
from gpuops.model import Entity, EntityKind, UnknownReason

RECORDED = Path(__file__).parents[2] / "fixtures" / "tools"
DISK = Entity(EntityKind.MOUNT, "/local")
GPUS = ("GPU-a", "GPU-b")
PORTS = [
    Port(
        device=f"mlx5_{number}",
        number=1,
        guid=f"guid{number}",
        state="ACTIVE",
        rate_gbs=50.0,
        link_layer="InfiniBand",
    )
    for number in range(3)
]
PAIR = (PORTS[0], PORTS[1])
PARSERS = {
    "all_reduce_perf": nccl_tests.parse,
    "nvbandwidth": partial(nvbandwidth.parse, gpus=GPUS),
    "fio": partial(fio.parse, part=DISK),
    "ib_write_bw": partial(perftest.parse, pair=PAIR, version="Version: 6.20"),
}


def recorded(name):
    return (RECORDED / f"{name}.json").read_text()


def flat(output):
    return [
        (" ".join(rate.parameters.values()), rate.values, rate.part and rate.part.id)
        for rate in output.rates
    ]


@pytest.mark.parametrize(
    ("name", "version", "rates"),
    [
        (
            "all_reduce_perf",
            "NCCL 22707",
            [
                ("nccl-tests all_reduce 8 1MiB", (54.27,), None),
                ("nccl-tests all_reduce 8 1024MiB", (475.09,), None),
            ],
        ),
        (
            "nvbandwidth",
            "v0.8",
            [
                ("nvbandwidth host_to_device_memcpy_ce", (55.3101,), "GPU-a"),
                ("nvbandwidth host_to_device_memcpy_ce", (55.2874,), "GPU-b"),
                ("nvbandwidth device_to_device_memcpy_read_ce", (395.908,), "GPU-a"),
                ("nvbandwidth device_to_device_memcpy_read_ce", (396.612,), "GPU-b"),
            ],
        ),
        (
            "fio",
            "fio-3.33",
            [("fio write", (2.913408766,), "/local"), ("fio read", (3.046212795,), "/local")],
        ),
        ("ib_write_bw", "6.20", [("ib_write_bw mlx5_0/1 mlx5_1/1", (49.05,), "guid0")]),
    ],
)
def test_the_recorded_output_has_these_rates_in_gb_per_second(name, version, rates):
    output = parse_output(PARSERS[name], recorded(name))

    assert (output.version, flat(output)) == (version, rates)


@pytest.mark.parametrize(
    ("name", "old", "new", "why"),
    [
        ("all_reduce_perf", '"nwrong":0.000000}', '"nwrong":null}', "TypeError"),
        ("all_reduce_perf", '"bus_bw":54.270000', '"bus_bw":0.000000', "0.0 is no rate"),
        ("all_reduce_perf", '"bus_bw":54.270000', '"bus_bw":"nan"', "'nan' is no rate"),
        ("nvbandwidth", '"55.3101"', '"0"', "'0' is no rate"),
        ("nvbandwidth", '"55.2874"', '"55.2874", "1"', "IndexError"),
        ("nvbandwidth", '"Passed"', '"Error"', "host_to_device_memcpy_ce: Error"),
        ("fio", '"error" : 0', '"error" : 5', "write: error 5"),
        ("fio", '"bw_bytes" : 3046212795', '"bw_bytes" : 0', "0 is no rate"),
        ("fio", "bw_bytes", "bw_b", "KeyError"),
        ("ib_write_bw", "392.40", "-1", "-1 is no rate"),
        ("ib_write_bw", "392.40", "NaN", "nan is no rate"),
        ("ib_write_bw", "392.40", "true", "True is no rate"),
    ],
)
def test_output_that_is_no_proof_of_a_measurement_is_unknown(name, old, new, why):
    text = recorded(name)
    assert old in text

    with pytest.raises(ProbeError, match=why) as raised:
        parse_output(PARSERS[name], text.replace(old, new))
    assert raised.value.reason == UnknownReason.CRASH


@pytest.mark.parametrize("exit_code", [0, 1])
def test_results_that_the_tool_found_wrong_are_wrong_whatever_its_exit_code(
    program, tmp_path, exit_code
):
    text = recorded("all_reduce_perf").replace('"nwrong":0.000000}', '"nwrong":3.000000}', 1)
    (tmp_path / "wrong.json").write_text(text)
    tool = program("tool", f'cp {tmp_path}/wrong.json "$1"; exit {exit_code}')

    output = measure(lambda path: [tool, path], nccl_tests.parse, 1.0)

    assert output.wrong == ("3 of 262144 elements were wrong",)


def test_a_tool_that_opened_its_output_and_failed_says_why_itself(program):
    tool = program("tool", 'touch "$1"; echo engine not loadable; exit 1')

    with pytest.raises(ProbeError, match="exited with 1: engine not loadable"):
        measure(lambda path: [tool, path], PARSERS["fio"], 1.0)


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("text", ["", "hello", "{}", "[1]", "null", '{"results": []}', "{" * 10**5])
def test_what_is_no_such_output_is_unknown(name, text):
    with pytest.raises(ProbeError):
        parse_output(PARSERS[name], text)


@pytest.mark.parametrize("name", PARSERS)
def test_half_of_an_output_is_unknown_wherever_it_ends(name):
    text = recorded(name).rstrip()
    for end in range(0, len(text) - 1, 37):
        with pytest.raises(ProbeError):
            parse_output(PARSERS[name], text[:end])


@pytest.mark.parametrize("name", PARSERS)
def test_a_field_that_nobody_knows_is_ignored(name):
    text = recorded(name)
    start = text.index("{") + 1
    longer = text[:start] + '"new": {"field": [1, null]},' + text[start:]

    assert parse_output(PARSERS[name], longer) == parse_output(PARSERS[name], text)


@pytest.fixture
def program(tmp_path):
    """Return what makes an executable of a shell script."""

    def make(name, text):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    return make


@pytest.mark.parametrize(
    ("text", "seconds", "reason", "why"),
    [
        ("echo no GPU is free; exit 1", 30, UnknownReason.CRASH, "exited with 1: no GPU is free"),
        ("exit 1", 30, UnknownReason.CRASH, "exited with 1: no output"),
        ("kill -9 $$", 30, UnknownReason.CRASH, "exited with -9"),
        ("cat", 30, UnknownReason.CRASH, "does not say what was measured"),
        ("head -c 100000000 /dev/zero; sleep 100", 30, UnknownReason.CRASH, "more than 8 MiB"),
        ("yes >&2", 30, UnknownReason.CRASH, "more than 8 MiB"),
        ("trap '' TERM; sleep 100", 0.5 - START_S, UnknownReason.TIMEOUT, "did not end in"),
    ],
)
def test_a_tool_that_fails_is_unknown_and_says_why(program, text, seconds, reason, why):
    tool = program("tool", text)

    with pytest.raises(ProbeError, match=why) as raised:
        measure(lambda path: [tool, path], PARSERS["fio"], seconds)
    assert raised.value.reason == reason


def test_a_tool_ends_with_the_process_that_runs_it(program, tmp_path):
    tool = program("tool", f"echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; sleep 100")
    code = f"from gpuops.host.tools.run import run_tool; run_tool([{tool!r}], 100)"
    runner = subprocess.Popen([sys.executable, "-c", code])
    pid_file = tmp_path / "pid"
    while not pid_file.exists():
        assert runner.poll() is None
        time.sleep(0.02)
    runner.send_signal(signal.SIGKILL)
    runner.wait()

    pid = int(pid_file.read_text())
    while (found := process_state(pid)) is not None and not found.ended:
        time.sleep(0.02)


def test_nccl_tests_writes_its_json_to_a_file(program, tmp_path):
    text = f'echo "$@" > {tmp_path}/words; for last; do :; done; echo "#"\n'
    tool = program("all_reduce_perf", f"{text}cp {RECORDED}/all_reduce_perf.json $last")

    output = nccl_tests.measure_all_reduce(tool, 8, 30)

    assert [rate.values for rate in output.rates] == [(54.27,), (475.09,)]
    assert "-g 8 -b 1M -e 1G -f 32 -c 1 -J " in (tmp_path / "words").read_text()


def test_nvbandwidth_prints_its_json(program):
    tool = program("nvbandwidth", f'[ "$1 $2" = "-j -t" ] && cat {RECORDED}/nvbandwidth.json')

    assert len(nvbandwidth.measure_copies(tool, GPUS, 30).rates) == 4


def test_fio_gets_a_file_without_a_name_on_the_disk(program, tmp_path):
    """The script writes to the file that the real fio would, through the open descriptor."""
    text = f"""for word; do case $word in
        --filename=*) file=${{word#*=}};;
        --output=*) out=${{word#*=}};;
        --size=*) size=${{word#*=}};;
    esac; done
    [ $(stat -Lc %s $file) = $size ] && echo x > $file && cp {RECORDED}/fio.json $out"""
    disk = tmp_path / "disk"
    disk.mkdir()

    output = fio.measure_disk(program("fio", text), disk, 2)

    assert [rate.part.id for rate in output.rates] == [str(disk)] * 2
    assert list(disk.iterdir()) == []


def test_fio_on_a_folder_that_cannot_be_written_is_left_out(program, tmp_path):
    with pytest.raises(ProbeError, match=r"cannot write in .*missing") as raised:
        fio.measure_disk(program("fio", "exit 1"), tmp_path / "missing", 2)
    assert raised.value.reason == UnknownReason.NOT_SUPPORTED


IB = """echo "$@" >> {folder}/calls
case "$1" in -V) echo "Version: 6.20"; exit 1;; esac
for last; do :; done
case "$last" in 127.0.0.1) ;; *) touch {folder}/listens; exec sleep 100;; esac
[ -e {folder}/listens ] || {{ echo "Couldn't connect to 127.0.0.1" >&2; exit 1; }}
for word; do case $word in --out_json_file=*) out=${{word#*=}};; esac; done
cp {recorded}/ib_write_bw.json $out
"""


def test_one_port_writes_to_the_next_whose_server_may_start_late(program, tmp_path):
    tool = program("ib_write_bw", IB.format(folder=tmp_path, recorded=RECORDED))

    output = perftest.measure_ports(tool, PAIR, 2)

    assert (output.version, flat(output)[0][1]) == ("6.20", (49.05,))
    calls = (tmp_path / "calls").read_text().splitlines()
    server = next(line for line in calls if line.startswith("-d mlx5_1 -i 1 -p "))
    assert server.endswith("-F --report_gbits -D 2")
    assert any(line.startswith("-d mlx5_0 -i 1 -p ") for line in calls)


def test_ports_write_in_a_ring_of_the_fastest_active_ones():
    slow, down = replace(PORTS[0], rate_gbs=12.5), replace(PORTS[0], state="DOWN")
    ethernet = replace(PORTS[0], link_layer="Ethernet")
    ring = perftest.port_pairs([slow, *PORTS, down, ethernet])

    names = [(one.device, other.device) for one, other in ring]
    assert names == [("mlx5_0", "mlx5_1"), ("mlx5_1", "mlx5_2"), ("mlx5_2", "mlx5_0")]
    assert perftest.port_pairs([PORTS[0], replace(PORTS[0], number=2)]) == []
    assert perftest.port_pairs([]) == []
