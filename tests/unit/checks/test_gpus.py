"""What the checks of GPUs share: who is asked about, who said nothing, who are peers."""

from dataclasses import replace

import pytest
from support.checks import CASE, NODE, said
from support.gpus import address, gpu, node, part, silent

from gpuops.checks.gpu.gpus import (
    GpuVerdict,
    NotReported,
    alone,
    counter_name,
    entity_of,
    judge_each,
    listed,
    majority,
    peers_of,
    selected,
    span,
    surely_selected,
)
from gpuops.host.nvml.facts import CallError, NvmlStatus
from gpuops.model import FailureClass, Status

BAD = GpuVerdict(status=Status.FAIL, message="is bad", failure_class=FailureClass.GPU_DRIVER)


def asking(*names):
    return replace(CASE, gpus=frozenset(names))


def judged(facts, case=CASE, *, bad=(), untold=None, calls=()):
    """Return the findings of a check that finds fault with the GPUs *bad*."""

    def one(it):
        if untold and it.index in untold:
            return NotReported(untold[it.index])
        return [BAD] if it.index in bad else ()

    return judge_each(
        "a_check", facts, case, one, lambda fine: GpuVerdict(message=f"{len(fine)} well"), calls
    )


@pytest.mark.parametrize(
    "name", ["1", "GPU-1", "gpu-1", address(1), address(1).upper(), f"0000{address(1)}"]
)
def test_a_gpu_is_asked_about_by_index_uuid_or_address(name):
    assert selected(node(gpu(0), gpu(1)), asking(name)) == (gpu(1),)


def test_all_gpus_are_asked_about_unless_some_are_named():
    facts = node(gpu(0), gpu(1))

    assert selected(facts, CASE) == (gpu(0), gpu(1))
    assert selected(facts, asking("0", "GPU-1")) == (gpu(0), gpu(1))


# As NVML lists them; the driver gave out the numbers of the device files in another order.
SHUFFLED = node(*(gpu(index, minor=minor) for index, minor in enumerate((2, 3, 1, 0))))


def numbered(*numbers):
    return asking(*(f"slurm:{number}" for number in numbers))


@pytest.mark.parametrize(
    ("numbers", "indices", "surely"),
    [
        ({0}, [0, 3], False),
        ({1}, [1, 2], False),
        ({0, 3}, [0, 1, 3], False),
        ({0, 1, 2, 3}, [0, 1, 2, 3], True),
    ],
    ids=str,
)
def test_a_number_of_slurms_is_an_index_or_a_device_file_and_both_are_judged(
    numbers, indices, surely
):
    assert [it.index for it in selected(SHUFFLED, numbered(*numbers))] == indices
    assert surely_selected(SHUFFLED, numbered(*numbers)) == surely


@pytest.mark.parametrize("minor", [1, None])
def test_a_number_of_slurms_is_sure_where_both_orders_are_one_or_no_minor_is_told(minor):
    facts = node(gpu(0), gpu(1, minor=minor))

    assert selected(facts, numbered(1)) == facts.nvml.gpus[1:]
    assert surely_selected(facts, numbered(1))


def test_an_index_or_a_uuid_is_sure_and_nothing_asked_about_is_not():
    assert surely_selected(SHUFFLED, asking("0", "GPU-1"))
    assert not surely_selected(SHUFFLED, CASE)


def test_numbers_of_slurms_count_the_parts_of_a_divided_gpu_so_that_all_are_judged():
    divided = part(gpu(0), "modes", mig=True)
    facts = node(divided, gpu(1))

    assert selected(facts, numbered(9)) == facts.nvml.gpus
    assert not surely_selected(facts, numbered(9))
    assert said(judged(facts, numbered(9))) == [("n1", "pass", None)]


def test_a_gpu_that_is_asked_about_and_not_listed_warns():
    findings = judged(node(gpu(0)), asking("0", "GPU-7"))

    assert said(findings) == [("n1", "pass", None), ("n1", "warn", "gpu_hw.missing")]
    assert findings[1].message == "selected GPU-7, which NVML does not list"


def test_a_job_without_gpus_asks_about_none():
    (finding,) = judged(node(gpu(0)), asking(), bad=[0])

    assert (finding.status.word, finding.message) == ("skip", "no GPU is selected")


def test_one_finding_for_all_that_are_well():
    (finding,) = judged(node(*map(gpu, range(8))))

    assert (finding.entity, finding.status.word, finding.message) == (NODE, "pass", "8 well")


def test_one_finding_for_each_that_is_bad_and_none_for_the_others():
    findings = judged(node(*map(gpu, range(8))), bad=[2, 5])

    assert said(findings) == [
        ("GPU-2", "fail", "gpu_sw.driver"),
        ("GPU-5", "fail", "gpu_sw.driver"),
    ]
    assert findings[0].message == "GPU 2: is bad"


def test_a_bad_gpu_that_nobody_asks_about_is_not_told_of():
    assert said(judged(node(gpu(0), gpu(1)), asking("0"), bad=[1])) == [("n1", "pass", None)]


def test_those_that_say_nothing_are_never_among_the_well():
    findings = judged(node(*map(gpu, range(4))), untold={1: "", 2: "", 3: "it is a test"})

    assert [(item.status.word, item.message) for item in findings] == [
        ("pass", "1 well"),
        ("skip", "not judged on GPUs 1, 2: no answer"),
        ("skip", "not judged on GPU 3: it is a test"),
    ]


def test_a_reason_that_all_share_does_not_list_them():
    (finding,) = judged(node(gpu(0), gpu(1)), untold={0: "it is a test", 1: "it is a test"})

    assert finding.message == "not judged on any GPU: it is a test"


@pytest.mark.parametrize(
    ("changes", "status", "reason", "why"),
    [
        ({"unsupported": ("nvmlA",)}, "skip", None, "not supported by the GPU or its driver"),
        ({"unsupported": ("nvmlB",)}, "skip", None, "no answer"),
        ({"errors": (CallError("nvmlA2", 999, "odd"),)}, "skip", None, "nvmlA2: odd"),
        ({"errors": (CallError("nvmlA", 4, "no"),)}, "unknown", "no_permission", "nvmlA: no"),
        ({"errors": (CallError("nvmlB", 4, "no"),)}, "skip", None, "no answer"),
        ({"hung_call": "nvmlC"}, "unknown", "timeout", "no answer in nvmlC"),
        ({"error": "bad", "error_code": 15}, "skip", None, "bad; see gpu_lost"),
        ({"error": "no", "error_code": 4}, "unknown", "no_permission", "no; see gpu_lost"),
    ],
)
def test_a_gpu_that_says_nothing_is_told_with_the_reason(changes, status, reason, why):
    facts = node(gpu(3, **changes))
    (finding,) = judged(facts, untold={3: ""}, calls=("nvmlA",))

    assert (finding.status.word, finding.unknown_reason) == (status, reason)
    assert finding.message == f"not judged on GPU 3: {why}"


def test_without_gpus_everything_is_skipped():
    assert said(judged(node())) == [("n1", "skip", None)]
    assert said(judged(node(status=NvmlStatus.ABSENT))) == [("n1", "skip", None)]


@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [
        (NvmlStatus.ABSENT, None, "missing_tool"),
        (NvmlStatus.ERROR, 18, "missing_tool"),
        (NvmlStatus.ERROR, 4, "no_permission"),
        (NvmlStatus.TIMEOUT, None, "timeout"),
        (NvmlStatus.CRASH, None, "crash"),
    ],
)
def test_gpus_behind_a_silent_nvml_are_unknown(status, code, reason):
    (finding,) = judged(silent(status, error_code=code))

    assert (finding.status.word, finding.unknown_reason) == ("unknown", reason)


def test_a_gpu_without_a_uuid_is_known_by_its_address():
    bare = gpu(1, uuid=None)

    assert entity_of(gpu(1), NODE).id == "GPU-1"
    assert entity_of(bare, NODE).id == f"PCI:{address(1)}"
    assert entity_of(replace(bare, address=None), NODE) == NODE
    assert counter_name("c", gpu(1), "n") == "c:GPU-1:n"
    assert counter_name("c", bare, "n") == f"c:PCI:{address(1)}:n"
    assert counter_name("c", replace(bare, address=None), "n") is None


def test_peers_are_gpus_of_the_same_model():
    old, new = gpu(0, "a100-sxm-80gb"), gpu(1, "h100-sxm")

    assert peers_of(old, node(old, new)) == [old]


@pytest.mark.parametrize(
    ("values", "most"),
    [([], None), ([None], None), ([1], 1), ([1, 2], None), ([1, 1, 2], 1), ([1, 1, 2, 2], None)],
)
def test_a_majority_is_more_than_half_of_those_that_say_something(values, most):
    assert majority([*values, None]) == most


def test_a_gpu_is_alone_where_neither_bus_nor_nvml_shows_another():
    assert alone(node(gpu(0)))
    assert not alone(node(gpu(0), on_bus=2))
    assert not alone(node(gpu(0), gpu(1), on_bus=0))


def test_words_for_people():
    assert (listed([gpu(3)]), listed([gpu(0), gpu(3)])) == ("GPU 3", "GPUs 0, 3")
    assert (span([]), span([None, 31.0]), span([31, 40.5])) == ("?", "31", "31 to 40.5")
