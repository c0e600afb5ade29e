"""No healthy node fails: the shipped limits and profiles against thousands of healthy nodes.

A look that gets a drawer in `support.healthy.DRAWERS` has all its checks judged here.
"""

import random
from dataclasses import replace

import pytest
from support.gpus import gpu, part, shipped, shipped_profile
from support.healthy import DRAWERS, healthy_case, healthy_gpus

from gpuops.checks import NAMES, check_named
from gpuops.host.node_state import Counters, CounterSample
from gpuops.host.nvml.facts import SAMPLES, CallError, Fabric, GpuMemory, GpuProcess, RemappedRows
from gpuops.model import Status

SHAPES = ("h100-sxm", "h200-sxm", "a100-sxm-80gb", "b200-sxm")
SUITES = ("full", "prolog", "epilog")
JUDGED = tuple(name for name in NAMES if check_named(name).probe.name in DRAWERS)


def judge(names, facts, case, parameters):
    """Return what the checks *names* find, each over the facts of its own look."""
    return [
        finding
        for name in names
        for finding in check_named(name).judge(
            facts[check_named(name).probe.name], parameters[name], case
        )
    ]


def free_gpus(facts):
    """Return the GPUs that are free: a hook asks about those of its own job only."""
    return frozenset(item.uuid for item in facts.nvml.gpus if item.utilization_percent == 0)


@pytest.mark.parametrize("n_nodes", [500, pytest.param(2500, marks=pytest.mark.soak)])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_healthy_node_fails(shape, n_nodes):
    rng = random.Random(shape)
    parameters = {suite: shipped(suite=suite) for suite in SUITES}
    for number in range(n_nodes):
        case = healthy_case(rng, shape)
        facts = {name: draw(rng, shape) for name, draw in DRAWERS.items()}
        suite = SUITES[number % len(SUITES)]
        if suite != "full":
            case = replace(case, gpus=free_gpus(facts["gpus"]))
        names = [name for name in JUDGED if name in parameters[suite]]
        findings = judge(names, facts, case, parameters[suite])

        assert {finding.check for finding in findings} == set(names)
        failed = [finding for finding in findings if finding.status is Status.FAIL]
        assert failed == [], f"node {number} of {shape}: {facts}"


def link_down(one):
    return replace(one, nvlinks=(replace(one.nvlinks[0], active=False), *one.nvlinks[1:]))


def left_behind(percent):
    memory = GpuMemory(total_bytes=1000, used_bytes=10 * percent, reserved_bytes=0)
    return lambda one: replace(one, processes=(), memory=memory)


def uncorrected(one):
    return part(one, "ecc", volatile_uncorrected=1)


FAULTS = [
    ("gpu_lost", lambda one: replace(one, error="lost", error_code=15)),
    ("gpu_lost", lambda one: replace(one, errors=(CallError("nvmlX", 16, "reset"),))),
    ("gpu_recovery_action", lambda one: replace(one, recovery_action=2)),
    ("gpu_row_remap", lambda one: replace(one, remapped=rows(failure=True))),
    ("gpu_ecc", lambda one: replace(uncorrected(one), remapped=None)),
    ("gpu_ecc", lambda one: replace(uncorrected(one), recovery_action=1)),
    ("gpu_ecc", lambda one: part(one, "ecc", sram_threshold_exceeded=True)),
    ("gpu_inforom", lambda one: replace(one, inforom_valid=False)),
    ("gpu_temperature", lambda one: part(one, "temperature", core_c=89.0, slowdown_c=89.0)),
    ("gpu_temperature", lambda one: part(one, "temperature", memory_c=95.0, memory_max_c=95.0)),
    ("gpu_throttle", lambda one: part(one, "clocks", reasons=0x40, samples=(0x40,) * SAMPLES)),
    ("gpu_throttle", lambda one: part(one, "clocks", reasons=0x80, samples=(0x80,) * SAMPLES)),
    ("gpu_pcie_link", lambda one: part(one, "pcie", width=8)),
    ("nvlink", link_down),
    ("gpu_fabric", lambda one: replace(one, fabric=Fabric(state=2, status=0))),
    ("gpu_fabric", lambda one: replace(one, fabric=Fabric(state=3, status=999))),
    ("gpu_modes", lambda one: part(one, "modes", ecc=False, ecc_pending=False)),
    ("gpu_processes", lambda one: replace(one, processes=(GpuProcess(pid=1, name="python3"),))),
    ("gpu_processes", left_behind(percent=30)),
]
SIGNS = [
    ("gpu_row_remap", lambda one: replace(one, remapped=rows(pending=True))),
    ("gpu_ecc", lambda one: part(one, "ecc", sram_aggregate_uncorrected=5)),
    ("gpu_power", lambda one: part(one, "power", limit_w=200.0, default_limit_w=700.0)),
    ("gpu_clocks", lambda one: part(one, "clocks", sm_max_mhz=900, sm_application_mhz=900)),
    ("gpu_versions", lambda one: replace(one, vbios="00.00.00.00.00")),
    ("gpu_ecc", uncorrected),
    ("gpu_recovery_action", lambda one: replace(one, recovery_action=5)),
    ("gpu_ecc_corrected", lambda one: part(one, "ecc", aggregate_corrected=1000)),
    ("gpu_pcie_replays", lambda one: part(one, "pcie", replays=480)),
    ("nvlink_errors", lambda one: replace(one, nvlinks=(counted(one.nvlinks[0]),))),
    ("nvlink_ber", lambda one: replace(one, nvlinks=(replace(one.nvlinks[0], symbol_ber=3e-16),))),
]


def rows(*, pending=False, failure=False):
    return RemappedRows(correctable=0, uncorrectable=1, pending=pending, failure=failure)


def counted(link):
    return replace(link, replay_errors=5)


def long_up(case):
    """Return *case* of a node that is long up and that counted nothing an hour ago."""
    nothing = dict.fromkeys(
        (
            "gpu_ecc_corrected:GPU-0:aggregate",
            "gpu_pcie_replays:GPU-0:replays",
            "nvlink_errors:GPU-0:replay",
        ),
        0.0,
    )
    past = CounterSample(boot_id="now", since_boot_s=86_400.0, t_us=0, values=nothing)
    counters = Counters(boot_id="now", since_boot_s=90_000.0, t_us=3_600_000_000, samples=(past,))
    return replace(case, profile=shipped_profile(), counters=counters)


@pytest.mark.parametrize(
    ("check", "break_it", "status"),
    [(*fault, Status.FAIL) for fault in FAULTS] + [(*sign, Status.WARN) for sign in SIGNS],
    ids=[f"{check}-{number}" for number, (check, _) in enumerate(FAULTS + SIGNS)],
)
def test_every_fault_among_healthy_gpus_is_found(check, break_it, status):
    rng = random.Random(check)
    parameters = shipped(suite="prolog")
    case = replace(long_up(healthy_case(rng, "h100-sxm")), gpus=frozenset({"GPU-0"}))
    for _ in range(20):
        drawn = healthy_gpus(rng, "h100-sxm").nvml.gpus[1:]
        others = [*drawn, gpu(8), gpu(9), *(gpu(index) for index in range(10, 18))]
        facts = replace_gpus(break_it(gpu(0)), others)
        found = judge([check], {"gpus": facts}, case, parameters)

        assert [(item.entity.id, item.status) for item in found] == [("GPU-0", status)]


def replace_gpus(bad, others):
    facts = healthy_gpus(random.Random(0), "h100-sxm")
    return replace(facts, nvml=replace(facts.nvml, gpus=(bad, *others)))


def test_the_checks_of_gpus_are_among_those_that_are_judged():
    assert len(JUDGED) >= 21
