"""Which connections a server of a job keeps while their clients have not proved the job's token.

A server cannot distinguish a slow node of the job from a client that only holds a place. So no
unauthenticated connection keeps another one out: where places run out, the oldest one from an
unknown address is cut off. Connections from known addresses, those of the job's nodes, have places
of their own, and authenticated connections are never cut off.
"""

import ipaddress
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

# From unknown addresses. A handshake is two short frames from each side: 10 ms within a data
# centre, also over a slow link. A node of the job that needs longer connects again, and has more
# time once the server knows its address.
UNKNOWN_HANDSHAKE_S = 1.0
C = TypeVar("C", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """The most connections: in all; unauthenticated: from unknown addresses, from one."""

    connections_max: int
    unknown_max: int
    per_address_max: int


class ConnectionAdmission(Generic[C]):
    """The connections of one server; not thread-safe."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._known: OrderedDict[str, None] = OrderedDict()
        self._authenticated: set[C] = set()
        # Unauthenticated, the oldest first: from unknown and from known addresses.
        self._waiting_unknown: OrderedDict[C, str] = OrderedDict()
        self._waiting_known: OrderedDict[C, str] = OrderedDict()
        self._by_address: dict[str, OrderedDict[C, None]] = {}

    def __len__(self) -> int:
        return len(self._authenticated) + self.n_waiting

    @property
    def n_waiting(self) -> int:
        """Return how many connections have not proved the token."""
        return len(self._waiting_unknown) + len(self._waiting_known)

    def set_known(self, addresses: Iterable[str]) -> None:
        """Keep places for new connections from *addresses*, and from no others."""
        self._known = OrderedDict.fromkeys(map(plain_address, addresses))

    def add_known(self, address: str) -> None:
        """Keep places for *address* too, from which the token was proved."""
        plain = plain_address(address)
        self._known[plain] = None
        self._known.move_to_end(plain)
        if len(self._known) > self._limits.connections_max:
            self._known.popitem(last=False)

    def is_known(self, address: str) -> bool:
        """Return whether *address* has places of its own."""
        return plain_address(address) in self._known

    def admit(self, connection: C, address: str) -> list[C] | None:
        """Admit *connection*; return those to cut off for it, None where it is to be turned away.

        It is turned away only where every place is taken by authenticated connections, or, if its
        address is unknown, by those and by known addresses.
        """
        address, limits = plain_address(address), self._limits
        is_known = address in self._known
        cut_off = []
        of_address = self._by_address.get(address, ())
        if len(of_address) >= limits.per_address_max:
            cut_off.append(next(iter(of_address)))
        elif not is_known and len(self._waiting_unknown) >= limits.unknown_max:
            cut_off.append(next(iter(self._waiting_unknown)))
        elif len(self) >= limits.connections_max:
            oldest = next(
                iter(self._waiting_unknown or (self._waiting_known if is_known else ())), None
            )
            if oldest is None:
                return None
            cut_off.append(oldest)
        for other in cut_off:
            self.remove(other)
        (self._waiting_known if is_known else self._waiting_unknown)[connection] = address
        self._by_address.setdefault(address, OrderedDict())[connection] = None
        return cut_off

    def refresh(self, connection: C) -> None:
        """Make *connection*, which has named the right job, the newest of those that wait."""
        for waiting in (self._waiting_unknown, self._waiting_known):
            if connection in waiting:
                waiting.move_to_end(connection)
                self._by_address[waiting[connection]].move_to_end(connection)

    def authenticate(self, connection: C) -> bool:
        """Record that *connection* has proved the token; return False where it was cut off."""
        if not self._forget_waiting(connection):
            return False
        self._authenticated.add(connection)
        return True

    def remove(self, connection: C) -> None:
        """Free the place of *connection*, if it has one."""
        self._forget_waiting(connection)
        self._authenticated.discard(connection)

    def _forget_waiting(self, connection: C) -> bool:
        address = self._waiting_unknown.pop(connection, None) or self._waiting_known.pop(
            connection, None
        )
        if address is None:
            return False
        of_address = self._by_address[address]
        del of_address[connection]
        if not of_address:
            del self._by_address[address]
        return True


def plain_address(address: str) -> str:
    """Return *address* in one spelling: without its zone, IPv4 also where IPv6 carries it."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    return str(getattr(found, "ipv4_mapped", None) or found)
