"""The real keeper behind what the agent asks: its process, and the line to it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuops.agent.checkpoint_keeper import Flushed, Started
from gpuops.checkpoint.agent_link import AgentLink
from gpuops.checkpoint.keeper_process import KeeperProcess, start_or_adopt
from gpuops.checkpoint.states import KeeperError

# Of what the keeper knows by heart; a restart of the workers waits for it.
ANSWER_S = 10.0
READY_S = 12.0
# What a keeper says where nobody has named a directory: there is nothing to wait for.
NOWHERE = "no directory for checkpoints is set"


class LinkedKeeper:
    """A keeper's process and the line to it; *job* names the run in what is persisted."""

    def __init__(self, link: AgentLink, process: KeeperProcess, job: str) -> None:
        self._link = link
        self._process = process
        self._job = job
        self._directory: str | None = None

    def begin_generation(self, generation: int, n_nodes: int, excluded_step: int | None) -> None:
        self._link.begin_generation(generation, n_nodes, excluded_step, job=self._job)

    def stats(self) -> Mapping[str, Any]:
        return self._link.stats()

    def events(self) -> Sequence[Mapping[str, Any]]:
        found = self._link.events()
        for item in found:
            if item.get("kind") == "persisted" and isinstance(item.get("directory"), str):
                self._directory = item["directory"]
        return found

    def flush(self, deadline_s: float) -> Flushed:
        done = self._link.flush(deadline_s)
        return Flushed(
            state=done.state,
            fitted=done.state is not None,
            has_place=done.why != NOWHERE,
            directory=self._directory,
            why=done.why or None,
        )

    def end(self) -> None:
        self._link.end()

    def close(self) -> None:
        self._link.close()
        self._process.is_running()  # reaps it where it has ended


def start_keeper(folder: Path, *, lease_s: float, node: str, job: str) -> Started:
    """Return the keeper in *folder*, started where none is there.

    One that does not answer is ended: nobody could have its memory, and no other could begin.

    Raises:
        KeeperError: It could not be started.
    """
    process = start_or_adopt(folder, lease_s=lease_s, node=node, ready_s=READY_S)
    try:
        link = AgentLink.connect(process.socket_path, deadline_s=ANSWER_S)
    except KeeperError:
        process.kill()
        raise
    return Started(
        tie=LinkedKeeper(link, process, job),
        socket=str(process.socket_path),
        pid=process.pid,
        adopted=process.adopted,
    )
