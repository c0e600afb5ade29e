"""Which hardware profile a node is held against.

In this order: the one that ``check.profile`` names; else the one that the GPUs speak for, as the
check itself sees them; where they tell nothing, or some are missing, the one that they last spoke
for on this node; else one that matches by the node's name alone. So a node whose driver hangs or
whose GPU fell off the bus is still held against what it had.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gpuops.checks.collect import Chooser, Looked
from gpuops.checks.profile import Profile
from gpuops.checks.profiles import fits, profile_for
from gpuops.errors import ConfigError
from gpuops.gate.state import GPUS_LOOK
from gpuops.host.gpus import Gpus
from gpuops.host.records import from_json
from gpuops.model import Entity, EntityKind, Finding, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is known of *node* before it is looked at; ``remembered`` is a profile's name."""

    profiles: Mapping[str, Profile]
    node: str
    named: str | None = None
    remembered: str | None = None

    def first(self) -> Profile:
        """Return the profile that holds as long as nothing was looked at.

        Raises:
            ConfigError: There is no profile called ``named``.
        """
        if self.named is None and self.remembered in self.profiles:
            return self.profiles[str(self.remembered)]
        return self._fitting((), 0)[0]

    def by(self, gpus: Gpus) -> Profile:
        """Return the profile that *gpus* speak for."""
        return self._speak_for(gpus)[0]

    def problem(self, gpus: object) -> Finding | None:
        """Return the finding about a choice that went wrong, given the facts of the GPUs.

        Hardware that nobody described is judged by its own word; only a contradiction warns.
        """
        text = self._speak_for(gpus)[1] if isinstance(gpus, Gpus) else None
        if text is None or not isinstance(gpus, Gpus):
            return None
        names, count = _seen(gpus)
        several = sum(fits(item.match, self.node, names, count) for item in self.profiles.values())
        return Finding(
            check="profile",
            entity=Entity(EntityKind.NODE, self.node),
            status=Status.WARN if several > 1 else Status.SKIP,
            message=text,
            source="checks/profiles",
        )

    def _speak_for(self, gpus: Gpus) -> tuple[Profile, str | None]:
        names, count = _seen(gpus)
        first = self.first()
        wanted = first.match.gpu_count
        if not names or (wanted is not None and count < wanted):
            return first, None
        return self._fitting(names, count)

    def _fitting(self, names: tuple[str, ...], count: int) -> tuple[Profile, str | None]:
        return profile_for(
            self.profiles, node=self.node, gpu_names=names, gpu_count=count, named=self.named
        )

    def chooser(self) -> Chooser:
        """Return how a run finds the profile."""
        return Chooser(self.first(), GPUS_LOOK, self._looked)

    def _looked(self, looked: Looked) -> Profile:
        if looked.error is not None:
            return self.first()
        try:
            return self.by(from_json(Gpus, looked.facts, "the GPUs"))
        except (ConfigError, ValueError):
            return self.first()


def _seen(gpus: Gpus) -> tuple[tuple[str, ...], int]:
    """Return what NVML calls each GPU, and how many are on the bus."""
    return tuple(gpu.name for gpu in gpus.nvml.gpus if gpu.name), len(gpus.pci)
