"""What tests of checks share: a node, limits, and the one finding of a judge."""

from gpuops.checks.core.check import CheckLimit, JudgeContext
from gpuops.model import Entity, EntityKind

NODE = Entity(EntityKind.NODE, "n1")
CASE = JudgeContext(node=NODE)


def limit(warn=None, fail=None):
    return CheckLimit(source="a test", warn=warn, fail=fail)


def said(findings):
    """Return what is compared most: entity, status, failure class of each finding."""
    return [
        (
            finding.entity.id,
            finding.status.word,
            finding.failure_class and finding.failure_class.value,
        )
        for finding in findings
    ]
