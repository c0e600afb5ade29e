"""Runs of the job that goes wrong on purpose, on this machine: one agent, or two on loopback."""

from support.cluster_run import LIMIT_S, ClusterRun
from support.hosts import Loopbacks


class FaultyRun(ClusterRun):
    """``gpuops run *flags faulty.py *words`` with *n_nodes* agents of *nproc* workers each."""

    def __init__(  # the many ways to start a run
        self, folder, flags, words, *, n_nodes=1, nproc=2, script="faulty.py", gate=False, **options
    ):
        self._hosts = Loopbacks(n_nodes, folder)
        flags = [*([] if gate else ["--health-gate", "off"]), *flags]
        options = {"script": script, "args": tuple(map(str, words)), "nproc": nproc, **options}
        super().__init__(self._hosts, folder, *flags, **options)
        if n_nodes == 1:
            self.flags = [f"--nproc-per-node={nproc}", *flags]

    def __exit__(self, *_):
        self._hosts.close()

    @property
    def host(self):
        """Return the only host, or the first."""
        return self._hosts[0]

    def ended(self, limit_s=LIMIT_S):
        """Wait for the end of the only agent; return its exit code."""
        return self.finish(self.host, limit_s=limit_s)[self.host.name]

    def payloads(self, kind):
        """Return the payloads of the events of one kind, oldest first."""
        return [event["payload"] for event in self.events(kind)]

    def rules(self):
        """Return the names of the rows of the decision table that fired."""
        return [made["decision"]["rule"] for made in self.decisions()]

    def generations(self):
        """Return the generations that the job saw."""
        return sorted({line.generation for line in self.lines()})


def culprits(incident):
    """Return what *incident* blames, as pairs."""
    return {(item["kind"], item["id"]) for item in incident["culprits"]}
