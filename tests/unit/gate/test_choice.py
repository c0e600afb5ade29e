"""The profile is the one the GPUs speak for; a node that lost something keeps the one it had."""

import json

import pytest

from gpuops.checks.core.probes import ProbeResult
from gpuops.checks.core.profile import NO_PROFILE, Profile, ProfileMatch
from gpuops.errors import ConfigError
from gpuops.gate.session import ProfileSelector
from gpuops.host.gpu_names import Gpus
from gpuops.host.nvml.facts import NvmlGpu, NvmlSnapshot, NvmlStatus
from gpuops.host.records import to_json
from gpuops.host.sysfs import PciGpu
from gpuops.model import Status, UnknownReason

H100 = Profile(name="h100", match=ProfileMatch(gpu="H100", gpu_count=8))
H200 = Profile(name="h200", match=ProfileMatch(gpu="H200"))
LOGIN = Profile(name="login", match=ProfileMatch(nodes=("login*",)))
TWIN = Profile(name="twin", match=ProfileMatch(gpu="H.00"))


def choice(*profiles, node="n1", **known):
    return ProfileSelector(profiles={item.name: item for item in profiles}, node=node, **known)


def gpus(name, count, *, on_bus=None, status=NvmlStatus.OK):
    on_bus = count if on_bus is None else on_bus
    pci = tuple(PciGpu(f"0000:{n:02x}:00.0", answers=True, driver="nvidia") for n in range(on_bus))
    listed = tuple(NvmlGpu(index=n, name=name) for n in range(count))
    return Gpus(pci, NvmlSnapshot(status=status, gpus=listed))


SILENT = gpus(None, 0, on_bus=8, status=NvmlStatus.TIMEOUT)


def test_the_gpus_choose_among_the_profiles():
    assert choice(H100, H200).select(gpus("H200", 8))[0] == H200


def test_the_profile_that_is_named_holds_whatever_the_gpus_say():
    assert choice(H100, H200, named="h100", remembered="h200").select(gpus("H200", 8))[0] == H100


def test_a_name_that_no_profile_has_is_a_mistake():
    with pytest.raises(ConfigError, match="there is no profile 'h10'"):
        choice(H100, named="h10").first()


def test_a_driver_that_hangs_leaves_the_profile_that_the_node_had():
    assert choice(H100, H200, remembered="h100").select(SILENT)[0] == H100


def test_a_gpu_that_is_gone_from_the_bus_leaves_the_profile_that_the_node_had():
    seven = gpus("H100", 7)

    assert choice(H100, remembered="h100").select(seven)[0] == H100
    assert choice(H100).select(seven)[0] == NO_PROFILE


def test_other_gpus_than_remembered_choose_anew():
    assert choice(H100, H200, remembered="h100").select(gpus("H200", 8))[0] == H200


def test_a_remembered_profile_that_is_no_longer_there_counts_for_nothing():
    assert choice(H200, remembered="h100").first() == NO_PROFILE


def test_a_node_without_gpus_is_known_by_its_name():
    assert choice(H100, LOGIN, node="login3").first() == LOGIN
    assert choice(H100, LOGIN, node="login3").select(gpus(None, 0))[0] == LOGIN


def test_two_profiles_that_match_warn_and_neither_holds():
    both = choice(H200, TWIN)
    problem = both.problem(gpus("H200", 8))

    assert both.select(gpus("H200", 8))[0] == NO_PROFILE
    assert problem.status is Status.WARN
    assert "all match this node" in problem.message


def test_hardware_that_nobody_described_is_told_and_no_warning():
    problem = choice(H100).problem(gpus("A Model", 4))

    assert problem.status is Status.SKIP
    assert "no profile matches this node (4 GPUs, A Model)" in problem.message


@pytest.mark.parametrize("seen", [gpus("H100", 8), gpus(None, 0), SILENT, None])
def test_there_is_nothing_to_say_of_a_choice_that_went_well(seen):
    assert choice(H100, remembered="h100").problem(seen) is None


def test_a_run_chooses_by_the_facts_as_they_travel():
    chooser = choice(H100, H200, remembered="h100").chooser()
    facts = json.loads(json.dumps(to_json(gpus("H200", 8))))

    assert (chooser.first, chooser.probe) == (H100, "gpus")
    assert chooser.choose(ProbeResult(probe="gpus", facts=facts)) == H200


@pytest.mark.parametrize(
    "result",
    [
        ProbeResult(probe="gpus", error="hung", reason=UnknownReason.TIMEOUT),
        ProbeResult(probe="gpus", facts=7),
        ProbeResult(probe="gpus", facts={"pci": [], "nvml": {"status": "odd"}}),
    ],
)
def test_a_probe_that_tells_nothing_leaves_the_first_profile(result):
    assert choice(H100, H200, remembered="h100").chooser().choose(result) == H100
