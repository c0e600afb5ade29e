"""What the agent makes of a monitor's word."""

from gpuops.incident.suspicion import SuspicionLevel, reports_of


def report_of(monitor, node="n1", generation=0):
    """Return the report that ends the generation, None where nothing does."""
    return next(iter(reports_of(monitor.poll(), here=node, generation=generation)), None)


def suspects_of(monitor):
    """Return what a restart should do without."""
    return [s for s in monitor.poll() if s.level is SuspicionLevel.SUSPECT]


def evidence_of(monitor, clock, within_s):
    """Return the evidence of *monitor*, by a deadline so many seconds from now."""
    return tuple(monitor.evidence(clock.mono_ns() + round(within_s * 1e9)))
