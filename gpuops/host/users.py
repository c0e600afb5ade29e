"""Whether users are known here, as the name service answers (nsswitch.conf(5): files, SSSD, LDAP).

A directory server that is down may keep getpwnam(3) waiting for a minute, so each user is looked up
in a child process of its own.
"""

import pwd
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpuops.errors import ProbeError
from gpuops.host.leftovers import UID_MIN
from gpuops.host.process import probe
from gpuops.host.process.abandoned import AbandonedProbes, abandoned
from gpuops.host.trust import text_of
from gpuops.model import UnknownReason

# login.defs: below are users of the system, which every machine has in its own files; so is nobody.
_NOBODY = 65534
_NAMES_MAX = 8
_MARGIN_S = 0.1

# The uid of a user, by uid (of a job) or by name; None: there is no such user.
Lookup = Callable[[int | str], int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class UserLookup:
    """One user, ``asked`` by name, or by number if it is the user ``of_job``.

    ``uid``: as found, None if there is no such user. ``silent``: why there was no answer in time.
    """

    asked: str
    elapsed_s: float
    of_job: bool = False
    uid: int | None = None
    silent: str | None = None


@dataclass(frozen=True, slots=True)
class Users:
    """The results; none if nobody was asked about."""

    lookups: tuple[UserLookup, ...] = ()


def is_system_user(uid: int) -> bool:
    """Return whether the machine's own files have *uid*, so that it says nothing of a directory."""
    return uid < UID_MIN or uid == _NOBODY


def read_users(
    root: Path,
    budget_s: float,
    names: tuple[str, ...],
    job_uid: int | None,
    *,
    lookup: Lookup | None = None,
    left: AbandonedProbes | None = None,
) -> Users:
    """Return the results for *names* and for the user of a job, asked at the same time.

    *left* are children that earlier runs abandoned; default: those of this machine.

    Raises:
        ProbeError: A lookup ended its process: a fault of its library, or of gpuops.
    """
    asked: list[int | str] = list(names[:_NAMES_MAX])
    if job_uid is not None and not is_system_user(job_uid):
        asked.insert(0, job_uid)
    if not asked:
        return Users()
    ask = lookup or (_name_service if root == Path("/") else _passwd_file(root))
    left = abandoned() if left is None else left
    deadline_s = max(budget_s - probe.STOP_S - _MARGIN_S, 0.1)
    started: dict[int, int | str] = {}
    children = []
    for user in asked:
        child = probe.start_call(
            partial(ask, user),
            deadline_s=deadline_s,
            question=f"user {root} {user}",
            left=left,
        )
        started[child.pid] = user
        children.append(child)
    found = {
        started[child.pid]: _result(started[child.pid], outcome)
        for child, outcome in probe.watch(children)
    }
    return Users(tuple(found[user] for user in asked))


def _result(user: int | str, outcome: probe.ProbeOutcome) -> UserLookup:
    uid, silent = None, None
    try:
        uid = probe.answer(outcome)
    except ProbeError as exc:
        if exc.reason != UnknownReason.TIMEOUT:
            raise
        silent = str(exc)
    return UserLookup(
        asked=str(user),
        elapsed_s=outcome.elapsed_s,
        of_job=isinstance(user, int),
        uid=uid,
        silent=silent,
    )


def _name_service(user: int | str) -> int | None:
    try:
        return (pwd.getpwuid(user) if isinstance(user, int) else pwd.getpwnam(user)).pw_uid
    except KeyError:
        return None


def _passwd_file(root: Path) -> Lookup:
    """Return a lookup in the ``etc/passwd`` of a fake root: nothing else of it can be asked."""

    def lookup(user: int | str) -> int | None:
        for line in (text_of(root / "etc/passwd") or "").splitlines():
            fields = line.split(":")
            if len(fields) > 2 and fields[2].isdecimal() and str(user) in (fields[0], fields[2]):
                return int(fields[2])
        return None

    return lookup
