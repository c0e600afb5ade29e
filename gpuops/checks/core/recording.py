"""The facts of one node at one time, to be judged elsewhere or later: schema ``gpuops.facts/1``.

A recording holds the results of the probes and what a judge knows of the node
(`gpuops.host.node_state`), so that judging it gives the same findings as on the node itself.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuops.checks.core.probes import ProbeResult, by_probe
from gpuops.checks.core.suite import Suite
from gpuops.errors import ConfigError, UsageError
from gpuops.host.node_state import BootMoment, NodeState
from gpuops.host.records import from_json, to_json
from gpuops.model import Json, UnknownReason, envelope
from gpuops.scrub import scrub_value
from gpuops.units import iso_utc

_SCHEMA = "gpuops.facts/"
VERSION = 1
# The end of the year 9999, and more seconds than any machine runs.
_END_US = 253_402_300_800_000_000
_UPTIME_MAX_S = 1e10
_GPUS_MAX = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What the probes of one suite read on ``node`` at ``moment``.

    ``profile`` and ``gpus_expected`` are what that node's configuration says.
    """

    node: str
    moment: BootMoment
    results: Mapping[str, ProbeResult]
    state: NodeState = field(default_factory=NodeState)
    profile: str | None = None
    gpus_expected: int | None = None
    gpuops_version: str = ""

    def to_json(self) -> Json:
        """Return the recording as JSON, without the secrets that facts may hold."""
        body = {
            "node": self.node,
            **to_json(self.moment),
            "t": iso_utc(self.moment.t_us),
            "profile": self.profile,
            "gpus_expected": self.gpus_expected,
            "looks": {name: _entry(result) for name, result in self.results.items()},
            "state": to_json(self.state),
        }
        scrubbed = scrub_value(envelope(f"{_SCHEMA}{VERSION}", body))
        assert isinstance(scrubbed, dict)
        return scrubbed

    def results_for(self, suite: Suite, first: str) -> Iterator[ProbeResult]:
        """Yield the result of each probe of *suite*, that of the probe called *first* first.

        A probe that was not recorded is not supported: earlier releases have fewer. Of
        *first*, on which the profile and most of a verdict rest, the checks are unknown then.

        Raises:
            UsageError: Facts have another form than this gpuops knows.
        """
        groups = by_probe(suite)
        for name in sorted(groups, key=lambda name: name != first):
            result = self.results.get(name)
            if result is None:
                error = f"the recording has no {name!r}"
                is_first = name == first
                reason = UnknownReason.NOT_RECORDED if is_first else UnknownReason.NOT_SUPPORTED
                yield ProbeResult(probe=name, error=error, reason=reason)
                continue
            if result.error is None:
                try:
                    from_json(groups[name][0].check.probe.facts, result.facts, f"probe {name!r}")
                except (ConfigError, ValueError) as exc:
                    raise UsageError(
                        f"the facts were recorded by gpuops {self.gpuops_version or '?'}, and this"
                        f" one reads another form: {exc}"
                    ) from exc
            yield result


def _entry(result: ProbeResult) -> Json:
    if result.error is None:
        return {"facts": result.facts}
    return {"error": result.error, "reason": result.reason}


def parse_recording(text: str, where: str) -> Recording:
    """Return the recording in *text*.

    Raises:
        UsageError: It is not one, or a later gpuops made it; *where* names it.
    """
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise UsageError(f"{where} is not a recording of `gpuops facts`: not JSON: {exc}") from exc
    if not isinstance(body, dict) or not str(body.get("schema", "")).startswith(_SCHEMA):
        text = f"{where} is not a recording of `gpuops facts`: its schema is not {_SCHEMA}…"
        raise UsageError(text)
    version = str(body["schema"]).removeprefix(_SCHEMA)
    if version != str(VERSION):
        made_by = body.get("gpuops_version", "?")
        raise UsageError(
            f"{where} is of version {version}, made by gpuops {made_by}; this gpuops reads"
            f" version {VERSION}: judge it with that one"
        )
    try:
        return _parsed(body, where)
    except (ConfigError, ValueError, KeyError, TypeError) as exc:
        what = f"{exc} is missing" if isinstance(exc, KeyError) else str(exc)
        raise UsageError(f"{where} is a broken recording: {what}") from exc


def _parsed(body: Mapping[str, Any], where: str) -> Recording:
    keys = ("boot_id", "since_boot_s", "t_us")
    if not isinstance(body["node"], str) or not isinstance(body["looks"], dict):
        raise ValueError("node is a name and looks a table")  # noqa: TRY004 one error kind
    if not body["node"].strip():
        raise ValueError("node is empty")
    moment = from_json(BootMoment, {key: body[key] for key in keys}, where)
    if not 0 <= moment.t_us < _END_US or not 0 <= moment.since_boot_s < _UPTIME_MAX_S:
        raise ValueError("t_us or since_boot_s is out of range")
    return Recording(
        node=body["node"],
        moment=moment,
        results={name: _result(name, entry) for name, entry in body["looks"].items()},
        state=from_json(NodeState, body["state"], f"state of {where}"),
        gpuops_version=str(body.get("gpuops_version", "")),
        **_configured(body),
    )


def _configured(body: Mapping[str, Any]) -> Json:
    """Return what the node's configuration said, with its types checked."""
    profile, expected = body.get("profile"), body.get("gpus_expected")
    if profile is not None and not isinstance(profile, str):
        raise ValueError(f"profile is a name, got {profile!r}")
    whole = isinstance(expected, int) and not isinstance(expected, bool)
    if expected is not None and not (whole and 0 <= expected <= _GPUS_MAX):
        raise ValueError(f"gpus_expected is a number from 0 to {_GPUS_MAX}, got {expected!r}")
    return {"profile": profile, "gpus_expected": expected}


def _result(name: str, entry: object) -> ProbeResult:
    if not isinstance(entry, dict):
        raise ValueError(f"probe {name!r} must be a table, got {entry!r}")  # noqa: TRY004 one error kind
    if "facts" in entry:
        return ProbeResult(probe=name, facts=entry["facts"])
    return ProbeResult(probe=name, error=str(entry["error"]), reason=UnknownReason(entry["reason"]))
