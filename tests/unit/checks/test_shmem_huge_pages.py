"""Huge pages for shared memory: as the kernel's two settings say."""

import pytest
from support.checks import CASE

from gpuops.checks.core.check import NoParameters
from gpuops.checks.host.shmem_huge_pages import judge
from gpuops.host.kernel_state import read_shmem_huge_pages

WORDS = "always within_size advise never deny force"
SETTINGS = [
    ("never", "inherit", "never", "skip"),
    ("advise", "inherit", "advise", "pass"),
    ("advise", None, "advise", "pass"),
    ("never", "within_size", "within_size", "pass"),
    ("always", "never", "never", "skip"),
    ("deny", "always", "deny", "skip"),
    (None, None, None, "skip"),
]


@pytest.mark.parametrize(("for_all", "own", "setting", "status"), SETTINGS)
def test_the_setting_of_the_page_size_counts_unless_it_inherits(
    tmp_path, for_all, own, setting, status
):
    folder = tmp_path / "sys/kernel/mm/transparent_hugepage"
    (folder / "hugepages-2048kB").mkdir(parents=True)
    for path, word in (("shmem_enabled", for_all), ("hugepages-2048kB/shmem_enabled", own)):
        if word is not None:
            text = f"inherit {WORDS}".replace(word, f"[{word}]")
            (folder / path).write_text(f"{text}\n")

    facts = read_shmem_huge_pages(tmp_path)
    (finding,) = judge(facts, NoParameters(), CASE)

    assert facts.setting == setting
    assert finding.status.word == status
    assert setting is None or f"shmem_enabled is {setting}" in finding.message
