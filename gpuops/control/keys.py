"""Where the things of one run lie on its board; see `gpuops.control.record` for what they are."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Where things of one run lie on the board.

    A board outlives runs, so all but the record carry the run's id: a new run under the same key
    does not find the seats of the one before.
    """

    run_id: str

    @property
    def prefix(self) -> str:
        return self.run_id[-12:]

    def agent(self, agent: str = "") -> str:
        return f"{self.prefix}/agent/{agent}"

    def alive(self, agent: str = "") -> str:
        return f"{self.prefix}/alive/{agent}"

    def generation(self, generation: int) -> str:
        """Return what all keys of *generation* begin with, and no other's."""
        return f"{self.prefix}/gen/{generation}/"

    def ready(self, generation: int, agent: str = "") -> str:
        return f"{self.generation(generation)}ready/{agent}"

    def roster(self, generation: int) -> str:
        return f"{self.generation(generation)}roster"

    def watermark(self) -> str:
        return f"{self.prefix}/ckpt/watermark"

    def restore(self, generation: int) -> str:
        return f"{self.generation(generation)}restore"

    def report(self, generation: int, agent: str = "") -> str:
        return f"{self.generation(generation)}report/{agent}"
