"""The lines of NVIDIA's driver put together: bursts of Xids and SXids, in bounded memory."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpuops.host.kmsg import KernelRecord
from gpuops.host.xid import (
    PROBED,
    RECOVERY_ACTION,
    parse_sxid,
    parse_xid,
    pci_address,
    sxid_head,
    xid_head,
)

MINUTES_MAX = 64
KINDS_MAX = 512
LINE_SHOWN_MAX = 300
US_PER_MINUTE = 60_000_000

_UUID = re.compile(r"NVRM: GPU at PCI:([0-9a-fA-F:.]{5,20}): (GPU-[0-9a-fA-F-]{8,40})")
_LOADED = re.compile(r"NVRM: loading NVIDIA UNIX\b")
# The driver logs that it was loaded after it has probed its GPUs.
_PROBE_US = 60_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """Lines of one code about one device within one minute since boot; ``line`` is the first.

    Of more minutes than `MINUTES_MAX` the oldest are joined into one.
    """

    address: str
    code: int
    minute: int
    count: int
    first_us: int
    last_us: int
    line: str
    fatal: bool | None = None
    link: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The newest Xid 154 of a GPU: the requested action, and its time (µs since boot)."""

    address: str
    action: str
    since_boot_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverLog:
    """The lines of NVIDIA's driver. ``loaded_us``: when it was last loaded, µs since boot.

    ``more`` counts the lines of devices and codes beyond `KINDS_MAX`, which are not kept.
    """

    xids: tuple[Burst, ...] = ()
    sxids: tuple[Burst, ...] = ()
    recovery: tuple[Recovery, ...] = ()
    loaded_us: int | None = None
    more: int = 0


@dataclass(slots=True)
class _Tally:
    """A `Burst` that grows."""

    minute: int
    count: int
    first_us: int
    last_us: int
    line: str
    link: int | None


@dataclass(slots=True)
class _Series:
    """The bursts of one code about one device, the oldest first."""

    address: str
    code: int
    fatal: bool | None
    tallies: list[_Tally] = field(default_factory=list)

    def count(self, record: KernelRecord) -> bool:
        """Count *record* in the burst of its minute; False if there is none yet."""
        since_boot_us = record.since_boot_us
        minute = since_boot_us // US_PER_MINUTE
        # Records of two CPUs may be slightly out of order in the log, so two are compared.
        for tally in self.tallies[:-3:-1]:
            if tally.minute == minute:
                tally.count += 1
                tally.first_us = min(tally.first_us, since_boot_us)
                tally.last_us = max(tally.last_us, since_boot_us)
                return True
        return False

    def add(self, record: KernelRecord, link: int | None) -> None:
        if self.count(record):
            return
        when_us, line = record.since_boot_us, record.text[:LINE_SHOWN_MAX].replace("\n", " ")
        self.tallies.append(_Tally(when_us // US_PER_MINUTE, 1, when_us, when_us, line, link))
        if len(self.tallies) > MINUTES_MAX:
            self._join_the_oldest()

    def recall(self, burst: Burst) -> None:
        """Add *burst*, of which some lines may have been added already."""
        for tally in self.tallies:
            if tally.minute == burst.minute:
                tally.count = max(tally.count, burst.count)
                tally.first_us = min(tally.first_us, burst.first_us)
                tally.last_us = max(tally.last_us, burst.last_us)
                return
        self.tallies.append(
            _Tally(burst.minute, burst.count, burst.first_us, burst.last_us, burst.line, burst.link)
        )
        self.tallies.sort(key=lambda tally: tally.minute)
        if len(self.tallies) > MINUTES_MAX:
            self._join_the_oldest()

    def _join_the_oldest(self) -> None:
        first, second, *rest = self.tallies
        second.count += first.count
        second.first_us = min(first.first_us, second.first_us)
        second.last_us = max(first.last_us, second.last_us)
        self.tallies = [second, *rest]

    def bursts(self) -> Iterator[Burst]:
        for tally in self.tallies:
            yield Burst(
                address=self.address,
                code=self.code,
                minute=tally.minute,
                count=tally.count,
                first_us=tally.first_us,
                last_us=tally.last_us,
                line=tally.line,
                fatal=self.fatal,
                link=tally.link,
            )


class DriverLines:
    """Collects the lines of NVIDIA's driver, record by record, in bounded memory."""

    def __init__(self) -> None:
        self.uuids: dict[str, str] = {}
        self._xids: dict[tuple[str, int, bool | None], _Series] = {}
        self._sxids: dict[tuple[str, int, bool | None], _Series] = {}
        # By a line's beginning: repeated lines of a storm are parsed once.
        self._known: dict[str, _Series] = {}
        self._recovery: dict[str, Recovery] = {}
        self._loaded_us: int | None = None
        self._probed_us: int | None = None
        self._more = 0

    def add(self, record: KernelRecord) -> bool:
        """Add *record*; return whether it is a line about an Xid or an SXid."""
        text = record.text
        if text.startswith("NVRM: "):
            return self._add_xid(record) or self._add_remark(record)
        if text.startswith("nvidia-nvswitch"):
            return self._add_sxid(record)
        return False

    def recall(self, earlier: DriverLog) -> None:
        """Add what was collected from the same log *earlier*, and may have left it meanwhile."""
        for found, bursts in ((self._xids, earlier.xids), (self._sxids, earlier.sxids)):
            for burst in bursts:
                series = self._series(found, burst.address, burst.code, fatal=burst.fatal)
                if series is not None:
                    series.recall(burst)
        for item in earlier.recovery:
            known = self._recovery.get(item.address)
            if known is None or known.since_boot_us < item.since_boot_us:
                self._recovery[item.address] = item
        times = [t for t in (self._loaded_us, earlier.loaded_us) if t is not None]
        self._loaded_us = max(times, default=None)
        self._more = max(self._more, earlier.more)

    def log(self) -> DriverLog:
        """Return the collected lines."""
        return DriverLog(
            xids=tuple(burst for series in self._xids.values() for burst in series.bursts()),
            sxids=tuple(burst for series in self._sxids.values() for burst in series.bursts()),
            recovery=tuple(self._recovery.values()),
            loaded_us=self._loaded_us,
            more=self._more,
        )

    def _add_xid(self, record: KernelRecord) -> bool:
        text = record.text
        head = xid_head(text)
        if head is None:
            return False
        if head.startswith(PROBED) and self._probed_us is None:
            self._probed_us = record.since_boot_us
        known = self._known.get(head)
        if known is not None and known.count(record):
            return True
        xid = parse_xid(text)
        if xid is None:
            return False
        series = self._series(self._xids, xid.address, xid.code, fatal=xid.fatal)
        if series is not None:
            series.add(record, xid.link)
            if xid.recovery is not None:
                self._recovery[xid.address] = Recovery(
                    address=xid.address, action=xid.recovery, since_boot_us=record.since_boot_us
                )
            elif xid.code != RECOVERY_ACTION:
                self._known[head] = series
        return True

    def _add_sxid(self, record: KernelRecord) -> bool:
        head = sxid_head(record.text)
        if head is None:
            return False
        known = self._known.get(head)
        if known is not None and known.count(record):
            return True
        sxid = parse_sxid(record.text)
        assert sxid is not None
        series = self._series(self._sxids, sxid.address, sxid.code, fatal=sxid.fatal)
        if series is not None:
            series.add(record, sxid.link)
            self._known[head] = series
        return True

    def _series(
        self,
        found: dict[tuple[str, int, bool | None], _Series],
        address: str,
        code: int,
        *,
        fatal: bool | None,
    ) -> _Series | None:
        key = address, code, fatal
        if key not in found:
            if len(self._xids) + len(self._sxids) >= KINDS_MAX:
                self._more += 1
                return None
            found[key] = _Series(address, code, fatal)
        return found[key]

    def _add_remark(self, record: KernelRecord) -> bool:
        uuid = _UUID.match(record.text)
        if uuid is not None and len(self.uuids) < KINDS_MAX:
            self.uuids[pci_address(uuid[1])] = uuid[2]
        elif _LOADED.match(record.text):
            when_us, probed_us = record.since_boot_us, self._probed_us
            is_same = probed_us is not None and when_us - probed_us <= _PROBE_US
            self._loaded_us = probed_us - 1 if is_same and probed_us is not None else when_us
            self._probed_us = None
        return False
