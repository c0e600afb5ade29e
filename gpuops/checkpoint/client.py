"""A rank's line to the keeper of its node."""

from gpuops.checkpoint.keeper import Grant, Keeper, Policy, Skipped

__all__ = ["Grant", "Keeper", "Policy", "Skipped"]
