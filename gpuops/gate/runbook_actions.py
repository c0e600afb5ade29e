"""What the runbooks say to do, for the failure classes that a run found."""

from collections.abc import Iterable
from pathlib import Path

from gpuops.errors import ConfigError
from gpuops.incident.runbook import parse
from gpuops.model import ActionKind, FailureClass, Finding, Status


def actions_for(findings: Iterable[Finding], folder: Path) -> dict[FailureClass, ActionKind]:
    """Return the action of each failing class whose page is in *folder* and can be read.

    A page that is missing or broken takes no node out: it is our mistake or the site's.
    """
    classes = {
        finding.failure_class
        for finding in findings
        if finding.status is Status.FAIL and finding.failure_class is not None
    }
    found = {}
    for kind in sorted(classes):
        path = folder / f"{kind.value}.md"
        try:
            found[kind] = parse(path.name, path.read_text(encoding="utf-8")).action
        except (OSError, UnicodeDecodeError, ConfigError):
            continue
    return found
