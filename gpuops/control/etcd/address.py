"""``etcd://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]…][?cacert=FILE&cert=FILE&key=FILE]``."""

import ssl
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from gpuops.control.store import ControlStoreError

SCHEME = "etcd://"
PORT = 2379
_TLS_OPTIONS = frozenset({"cacert", "cert", "key"})
_FORM = f"{SCHEME}HOST:PORT, further members after commas"


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdAddress:
    """The members of one etcd. ``tls``: files by name; where there is one, the calls use TLS."""

    members: tuple[tuple[str, int], ...]
    user: str = ""
    password: str = field(default="", repr=False)
    tls: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, url: str) -> Self:
        """Return what *url* says.

        Raises:
            ControlStoreError: It is malformed; the message does not repeat it, it may hold a
                password.
        """
        try:
            parts = urlsplit(url)
            login, _, hosts = parts.netloc.rpartition("@")
            members = tuple(_member(text) for text in hosts.split(","))
            options = parse_qsl(parts.query, strict_parsing=True) if parts.query else []
        except ValueError:
            raise ControlStoreError(f"the URL of etcd is malformed; write {_FORM}") from None
        if unknown := {name for name, _file in options} - _TLS_OPTIONS:
            raise ControlStoreError(
                f"the URL of etcd has the unknown option {min(unknown)!r}; "
                f"it takes {', '.join(sorted(_TLS_OPTIONS))}"
            )
        if parts.path.strip("/"):
            raise ControlStoreError(f"the URL of etcd has a path, and etcd has none; write {_FORM}")
        user, _, password = login.partition(":")
        return cls(
            members=members,
            user=unquote(user),
            password=unquote(password),
            tls=tuple(options),
        )

    def __str__(self) -> str:
        """Return the address without its password."""
        login = f"{quote(self.user, safe='')}@" if self.user else ""
        hosts = ",".join(
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.members
        )
        return SCHEME + login + hosts + (f"?{urlencode(self.tls)}" if self.tls else "")

    def tls_context(self) -> ssl.SSLContext | None:
        """Return what the calls use for TLS, None for plain HTTP.

        Raises:
            ControlStoreError: A file cannot be read, or is not what it should be.
        """
        if not self.tls:
            return None
        files = dict(self.tls)
        try:
            context = ssl.create_default_context(cafile=files.get("cacert"))
            if "cert" in files:
                context.load_cert_chain(files["cert"], files.get("key"))
        except OSError as exc:  # ssl.SSLError is one
            raise ControlStoreError(
                f"cannot use the TLS files {', '.join(files.values())} for etcd: {exc}"
            ) from exc
        return context


def _member(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("no host")
    return parts.hostname, parts.port or PORT
