"""A hardware profile of a node that is known to be good, from the facts of its checks.

`profile_rows` says how each key is filled in. Nothing is captured from a node that the checks find
fault with (`objections`), and the new profile is judged on the same facts before it is returned.
"""

import json
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpuops.checks import check_named
from gpuops.checks.core.profile import NO_PROFILE, Profile, TextExpectation
from gpuops.checks.core.profile_files import BOUNDS, load_profiles, parse_profile, profile_for
from gpuops.checks.core.runner import CheckRun
from gpuops.errors import GpuopsError
from gpuops.gate.profile_rows import ROWS, Value
from gpuops.gate.session import (
    CheckPlan,
    ProfileSelector,
    judge_recording,
    names_and_count,
    record_facts,
)
from gpuops.host.clock import Clock
from gpuops.host.gpu_names import Gpus
from gpuops.host.storage.mounts import Filesystems, is_ignored, read_mounts
from gpuops.model import Finding, Status
from gpuops.resources import data_dir
from gpuops.units import iso_utc

# Those that run permanently and that jobs need; what does not run here is left out.
CANDIDATES = Profile(
    name="candidates",
    services=TextExpectation(
        value=(
            "munge",
            "slurmd",
            "chronyd",
            "chrony",
            "ntpd",
            "systemd-timesyncd",
            "sssd",
            "nslcd",
            "docker",
            "containerd",
            "nvidia-fabricmanager",
            "nvidia-persistenced",
            "nvidia-imex",
            "nvidia-dcgm",
        ),
        source="candidates",
    ),
    kernel_modules=TextExpectation(
        value=("nvidia", "nvidia_uvm", "nvidia_peermem", "nvidia_fs", "gdrdrv", "ib_uverbs"),
        source="candidates",
    ),
)


def objections(run: CheckRun, accepted: Collection[str]) -> list[Finding]:
    """Return the findings for which nothing may be captured, the worst first.

    Failures and what could not be judged in time; and warnings of checks that fill the profile,
    except those of the checks *accepted*: a port that is down only warns without a profile.
    """
    fill = {row.check for row in ROWS} | {"mount_state"}
    found = [
        item
        for item in run.findings
        if item.status in {Status.FAIL, Status.UNKNOWN}
        or (
            item.status is Status.WARN
            and item.unknown_reason is None
            and item.check in fill
            and item.check not in accepted
        )
    ]
    return sorted(found, key=lambda item: -item.status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """``text``: the file of the profile; "" if there are ``objections`` to the node.

    ``unused``: why no node would be judged by it, if it lay among the site's profiles.
    """

    text: str = ""
    unused: str | None = None
    objections: tuple[Finding, ...] = ()


def capture(plan: CheckPlan, path: Path, accepted: Collection[str], clock: Clock) -> Capture:
    """Return the profile of this node, to be written to *path*; reads the node twice.

    Raises:
        GpuopsError: The node does not pass the checks of its own profile.
    """
    recording, _ = record_facts(plan, clock)
    run = judge_recording(plan, recording)
    against = objections(run, accepted)
    if against:
        return Capture(objections=tuple(against))
    candidates = _with_profile(plan, CANDIDATES)
    suite = plan.suite.only(("services", "kernel_modules"))
    more, _ = record_facts(replace(candidates, suite=suite), clock)
    asked = judge_recording(replace(candidates, suite=suite), more).facts
    day = iso_utc(recording.moment.t_us)[:10]
    facts = _without_automounts({**run.facts, **asked}, plan.request.root)
    text = profile_text(facts, node=recording.node, day=day, root=plan.request.root)
    profile = parse_profile(path, tomllib.loads(text), plan.profiles)
    both = replace(recording, results={**recording.results, **more.results})
    again = judge_recording(_with_profile(plan, profile), replace(both, profile=profile.name))
    wrong = [item for item in again.findings if item.status is Status.FAIL]
    if wrong:
        raise GpuopsError(
            f"the node changed while it was captured, nothing is written: {wrong[0].check}: "
            f"{wrong[0].message}; try again"
        )
    return Capture(text=text, unused=_why_unused(plan, profile, facts.get("gpus")))


def _why_unused(plan: CheckPlan, profile: Profile, gpus: object) -> str | None:
    if not isinstance(gpus, Gpus):
        return None
    profiles = {**plan.profiles, profile.name: profile}
    chosen, problem = ProfileSelector(profiles=profiles, node=plan.request.node).select(gpus)
    return None if chosen is profile else problem


def _with_profile(plan: CheckPlan, profile: Profile) -> CheckPlan:
    return replace(
        plan,
        profiles={**plan.profiles, profile.name: profile},
        request=replace(plan.request, profile=profile.name),
    )


def _without_automounts(facts: Mapping[str, Any], root: Path) -> Mapping[str, Any]:
    """Return *facts* without mounts that autofs makes when they are used, and removes again."""
    automatic = [item.point for item in read_mounts(root) if item.filesystem == "autofs"]
    patterns = tuple(text for point in automatic for text in (point, f"{point}/*"))
    name = check_named("mount_alive").probe.name
    mounts = facts.get(name)
    if not isinstance(mounts, Filesystems):
        return facts
    kept = tuple(item for item in mounts.answers if not is_ignored(item.mount.point, patterns))
    return {**facts, name: replace(mounts, answers=kept)}


def profile_text(facts: Mapping[str, Any], *, node: str, day: str, root: Path = Path("/")) -> str:
    """Return the TOML of the profile that *facts* (by probe) give; *day* is a date."""
    gpus = facts.get("gpus")
    names, count = names_and_count(gpus) if isinstance(gpus, Gpus) else ((), 0)
    shipped = load_profiles([data_dir("checks") / "profiles"])
    base, _ = profile_for(shipped, node=node, gpu_names=names, gpu_count=count)
    models = Counter(names)
    shown = ", ".join(f"{number} x {name}" for name, number in models.items()) or "no GPU"
    lines = [f"about = {_quoted(f'captured on {node}, {day}: {shown}')}"]
    if base is not NO_PROFILE:
        lines.append(f"inherits = {_quoted(base.name)}")
    lines += [f"# {text}" for text in _versions(gpus, root)]
    lines.append("")
    for row in ROWS:
        fact = facts.get(check_named(row.check).probe.name)
        value = None if fact is None else row.value(fact)
        written = None if value is None else _written(row.key, value)
        if written is not None:
            source = _quoted(f"captured on {node}, {day} ({row.check})")
            lines.append(f"{row.key} = {{ value = {written}, source = {source} }}")
    lines += ["", "[match]"]
    if len(models) > 1:
        # A pattern of all models would match nodes with one of them, too.
        lines += [
            f"gpu_count = {count or len(names)}",
            f"nodes = [{_quoted(node)}]  # add those like it",
        ]
    elif names:
        pattern = re.sub(r"([][\\.^$*+?{}|()])", r"\\\1", names[0])
        lines += [f"gpu = {_quoted(pattern)}", f"gpu_count = {count or len(names)}"]
    else:
        lines.append(f"nodes = [{_quoted(node)}]")
    return "\n".join(lines) + "\n"


def _versions(gpus: object, root: Path) -> list[str]:
    """Return what no check compares, for people: the kernel, and NVML after its CUDA version."""
    try:
        kernel = (root / "proc/sys/kernel/osrelease").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        kernel = ""
    found = [f"kernel {kernel}"] if kernel.isprintable() and kernel else []
    if isinstance(gpus, Gpus) and gpus.nvml.nvml_version:
        cuda = gpus.nvml.nvml_version.partition(".")[0]
        found.append(f"CUDA {cuda} (NVML {gpus.nvml.nvml_version})")
    return [text for text in found if text.isprintable()]


def _written(key: str, value: Value) -> str | None:
    """Return *value* in TOML, None if it is beyond the plausible range of *key*."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        items = [_quoted(item) if isinstance(item, str) else _written(key, item) for item in value]
        return None if None in items else f"[{', '.join(map(str, items))}]"
    assert value is not None
    bounds = BOUNDS[key]
    number = int(value) if bounds.whole else round(float(value), 3)
    try:
        bounds.check(number)
    except ValueError:
        return None
    return repr(number)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
