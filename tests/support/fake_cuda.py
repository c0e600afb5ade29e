"""Streams and events of CUDA without a device: who comes after whom, by the calls that are made."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from gpuops.worker.staging import pinned_buffer, small_tensors


@dataclass(eq=False)
class Work:
    """Something that was put on *stream*; it begins when all of *after* is done."""

    name: str
    stream: "FakeStream"
    after: frozenset["Work"]
    run: Callable[[], object] = lambda: None
    is_done: bool = False

    def do(self):
        if not self.is_done:
            self.is_done = True
            for work in self.after:
                work.do()
            self.run()


@dataclass(eq=False)
class FakeStream:
    """What is put on it comes after all of *known*."""

    known: set[Work] = field(default_factory=set)

    def wait_stream(self, other):
        self.known |= other.known

    def wait_event(self, event):
        self.known |= event.known

    def synchronize(self):
        for work in self.known:
            work.do()


@dataclass(eq=False)
class FakeEvent:
    """Done when all of *known* is."""

    known: frozenset[Work] = frozenset()

    def record(self, stream):
        self.known = frozenset(stream.known)

    def query(self):
        return all(work.is_done for work in self.known)

    def synchronize(self):
        for work in self.known:
            work.do()


class FakeRuntime:
    """What `torch.cuda.cudart` returns: pins nothing, and returns *code* as if it had tried."""

    def __init__(self):
        self.code = 0
        self.registered = {}  # the size by address

    def cudaHostRegister(self, address, nbytes, _flags):  # noqa: N802 as CUDA calls it
        if self.code == 0:
            self.registered[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address):  # noqa: N802 as CUDA calls it
        del self.registered[address]
        return 0

    def is_pinned(self, tensor):
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(at <= begin and end <= at + size for at, size in self.registered.items())


class FakeCuda:
    """Takes the place of what the staging uses of `torch.cuda`.

    Copies that block are made at once, the others when the device comes to them. Unless it
    *gathers*, no tensor is small.
    """

    def __init__(self, monkeypatch, *, gathers=False):
        if not gathers:
            monkeypatch.setattr(small_tensors, "SMALL_TENSOR_BYTES", 0)
        self.computing = self._current = FakeStream()
        self.works = []
        self.from_pinned = []  # of each copy, whether its source was pinned then
        self.runtime = FakeRuntime()
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: self._current)
        monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
        monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
        monkeypatch.setattr(torch.cuda, "stream", self._stream)
        monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self.runtime)
        copy = torch._foreach_copy_

        def recorded(targets, sources, *, non_blocking=False):
            for target, source in zip(targets, sources, strict=True):
                work = self.launch(f"copy {source.data_ptr()}")
                self.from_pinned.append(self.runtime.is_pinned(source))
                work.run = torch.no_grad()(partial(copy, [target], [source]))
                if not non_blocking:
                    work.do()

        monkeypatch.setattr(torch, "_foreach_copy_", recorded)

    def hold_tensors(self, monkeypatch):
        """Have the tensors on the host be those of a device."""
        monkeypatch.setattr(
            pinned_buffer, "first_cuda_device", lambda _tensors: torch.device("cpu")
        )

    def catch_up(self):
        """Have the device do all that was launched."""
        for work in self.works:
            work.do()

    def launch(self, name):
        """Put a work called *name* on the current stream; return it."""
        stream = self._current
        work = Work(name, stream, frozenset(stream.known))
        stream.known.add(work)
        self.works.append(work)
        return work

    def launch_beside(self, name):
        """Put a work on a stream of its own; return it."""
        with self._stream(FakeStream()):
            return self.launch(name)

    def copy_of(self, tensor):
        """Return the only copy of *tensor*."""
        (work,) = [w for w in self.works if w.name == f"copy {tensor.data_ptr()}"]
        return work

    @contextlib.contextmanager
    def _stream(self, stream):
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before
