"""Where the output of each rank goes: a directory for each generation, never emptied.

torch's own `DefaultLogsSpecs` numbers directories by restarts of its agent and empties them first,
so that a restart which did not count takes the evidence of the one before with it.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, Std, to_map

from gpuops.agent.elastic.exits import RankFiles
from gpuops.agent.journal.run_dir import SPACE_BYTES_MIN, has_space
from gpuops.units import format_bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankLogFiles:
    """What `GenerationLogs` must know of the generation about to start."""

    directory: Path
    ranks: Mapping[int, int]
    worker_env: Mapping[int, Mapping[str, str]]


@dataclass(slots=True)
class _Streams:
    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)
    tee_stdouts: dict[int, str] = field(default_factory=dict)
    tee_stderrs: dict[int, str] = field(default_factory=dict)


class GenerationLogs(LogsSpecs):
    """torch's hook for log files; also hands each worker what the shim needs to know.

    With *inner* (the user's own ``--logs-specs``) the files are its business. With *log_dir* (the
    user's ``--log-dir``) they go there, below the run's own folder name; to no file for /dev/null.
    """

    def __init__(
        self,
        redirects: Std | dict[int, Std],
        tee: Std | dict[int, Std],
        local_ranks_filter: set[int] | None,
        inner: LogsSpecs | None = None,
        log_dir: Path | None = None,
        *,
        kind: type[LogsDest] = LogsDest,
    ) -> None:
        super().__init__(None, redirects, tee, local_ranks_filter)
        self._kind = kind
        self._inner = inner
        self._log_dir = log_dir
        self._next: RankLogFiles | None = None
        self.files: dict[int, RankFiles] = {}

    @property
    def root_log_dir(self) -> str:
        return "" if self._next is None else str(self._next.directory)

    def prepare(self, placement: RankLogFiles) -> None:
        """Say where the next `reify` puts things."""
        self._next = placement

    def directory(self, in_run_directory: Path) -> Path:
        """Return where a generation's logs go whose place in the run directory is given."""
        if self._log_dir is None:
            return in_run_directory
        return self._log_dir.absolute() / in_run_directory.parent.name / in_run_directory.name

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the destinations for *envs* (by local rank), and complete these environments."""
        assert self._next is not None, "prepare() comes first"
        for local_rank, extra in self._next.worker_env.items():
            envs[local_rank].update(extra)
        if self._inner is not None:
            dest = self._inner.reify(envs)
            self.files = {rank: _files_of(dest, rank) for rank in envs}
            return dest
        if self._log_dir is not None and str(self._log_dir) == os.devnull:
            return self._console_only(envs)
        try:
            return self._reify(envs, self._next)
        except OSError:
            return self._console_only(envs)

    def _reify(self, envs: dict[int, dict[str, str]], place: RankLogFiles) -> LogsDest:
        place.directory.mkdir(parents=True, exist_ok=True)
        to_files = has_space(place.directory)
        if not to_files:
            log.warning(
                "the ranks' output goes to the console only: less than %s are free in %s",
                format_bytes(SPACE_BYTES_MIN),
                place.directory,
            )
        redirects, tees = to_map(self._redirects, len(envs)), to_map(self._tee, len(envs))
        streams, errors = _Streams(), {}
        for local_rank, env in envs.items():
            folder = place.directory / f"rank{place.ranks[local_rank]}"
            folder.mkdir(exist_ok=True)
            errors[local_rank] = env["TORCHELASTIC_ERROR_FILE"] = str(folder / "error.json")
            env["GPUOPS_ERROR_FILE"] = str(folder / "exception.json")
            env["GPUOPS_STACKS"] = str(folder / "stacks.txt")
            tee = tees[local_rank] if to_files else Std.NONE
            wanted = (redirects[local_rank] | tees[local_rank]) if to_files else Std.NONE
            self._place(streams, local_rank, folder, wanted, tee)
        dest = _destinations(
            self._kind,
            stdouts=streams.stdouts,
            stderrs=streams.stderrs,
            tee_stdouts=streams.tee_stdouts,
            tee_stderrs=streams.tee_stderrs,
            error_files=errors,
            filtered_stdout=str(place.directory / "filtered_stdout.log"),
            filtered_stderr=str(place.directory / "filtered_stderr.log"),
        )
        self.files = {
            rank: _files_of(
                dest,
                rank,
                Path(env["GPUOPS_ERROR_FILE"]),
                Path(env["GPUOPS_STACKS"]),
            )
            for rank, env in envs.items()
        }
        return dest

    def _place(
        self, streams: _Streams, local_rank: int, folder: Path, wanted: Std, tee: Std
    ) -> None:
        hidden = bool(self._local_ranks_filter) and local_rank not in (
            self._local_ranks_filter or ()
        )
        for std, name, files, tees in (
            (Std.OUT, "stdout.log", streams.stdouts, streams.tee_stdouts),
            (Std.ERR, "stderr.log", streams.stderrs, streams.tee_stderrs),
        ):
            console = os.devnull if hidden else ""
            files[local_rank] = str(folder / name) if std in wanted else console
            if std in tee and not hidden:
                tees[local_rank] = files[local_rank]

    def _console_only(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return destinations that need no file at all: a lost log directory ends no training."""
        for env in envs.values():
            env["TORCHELASTIC_ERROR_FILE"] = ""
        self.files = {rank: RankFiles() for rank in envs}
        console = dict.fromkeys(envs, "")
        return _destinations(
            self._kind,
            stdouts=console,
            stderrs=dict(console),
            tee_stdouts={},
            tee_stderrs={},
            error_files=dict.fromkeys(envs, os.devnull),
            filtered_stdout="",
            filtered_stderr="",
        )


def _destinations(kind: type[LogsDest], **values: Any) -> LogsDest:  # noqa: ANN401 as torch types them
    """Return a *kind* with those of *values* that it has: torch 2.8 filters no output."""
    return kind(**{f.name: values[f.name] for f in fields(kind) if f.name in values})


def _files_of(
    dest: LogsDest, rank: int, exception: Path | None = None, stacks: Path | None = None
) -> RankFiles:
    def path(text: str | None) -> Path | None:
        return Path(text) if text and text != os.devnull else None

    return RankFiles(
        stdout=path(dest.stdouts.get(rank)),
        stderr=path(dest.stderrs.get(rank)),
        torch_error=path(dest.error_files.get(rank)),
        exception=exception,
        stacks=stacks,
    )
