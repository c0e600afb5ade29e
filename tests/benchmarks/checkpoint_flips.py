"""Single bits are flipped, one at a time, and each way of loading is asked whether it notices."""

import contextlib
import random
import select
import shutil
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from checkpoint_torch import wait_until
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from gpuops.checkpoint.digest import compute_digest
from gpuops.checkpoint.hashed_image import HashedImage
from gpuops.checkpoint.image import TensorSpec, plan_image
from gpuops.checkpoint.keeper.agent_client import KeeperClient
from gpuops.checkpoint.keeper.messages import CheckpointPolicy, Lease
from gpuops.checkpoint.memory.shared_buffer import SharedBuffer
from gpuops.checkpoint.storage.address import open_store
from gpuops.checkpoint.storage.inspection import verify_state
from gpuops.checkpoint.transfer.chunks import PinnedCopy
from gpuops.checkpoint.transfer.client import fetch
from gpuops.checkpoint.transfer.connection import TransferLimits
from gpuops.checkpoint.transfer.pacing import SendPace
from gpuops.checkpoint.transfer.parallel import TransferOptions
from gpuops.checkpoint.transfer.server import TransferServer
from gpuops.checkpoint.transfer.wire import JobCredentials
from gpuops.checkpoint.types import (
    CorruptError,
    KeeperAddress,
    Shard,
    ShardCopy,
    StateId,
    Tier,
)
from gpuops.host.clock import SystemClock
from gpuops.worker.bench.savers import BenchError, connect_only_rank, start_keeper
from gpuops.worker.map_ahead import MappedImages

_CONTROL_EVERY = 16
_DEADLINE_S = 60.0
_TENSOR_BYTES = 2**18


@dataclass(slots=True)
class FlipCounts:
    """What came of flips.

    ``found``: it was refused, or the right bytes came from elsewhere. ``silent``: wrong values were
    loaded as if they were right. ``harmless``: the bit was of no consequence. ``alarms``: unchanged
    bytes were refused.
    """

    where: str
    way: str
    flips: int = 0
    found: int = 0
    silent: int = 0
    harmless: int = 0
    alarms: int = 0


def flip_rows(
    n_flips: int, nbytes: int, folder: Path, rng: random.Random, on_message: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return what came of *n_flips* flips, a third each in memory, on the wire and on disk."""
    n_wire = n_disk = n_flips // 3
    n_slot = n_flips - n_wire - n_disk
    image = _RandomImage(nbytes, rng)
    counts = []
    with contextlib.ExitStack() as stack:
        held_image = _HeldImage(image, folder)
        stack.callback(held_image.close)
        on_message(f"{n_slot} flips in memory")
        counts.append(_flip_in_memory(held_image, n_slot, rng))
        on_message(f"{n_disk} flips on disk")
        counts.append(_flip_on_disk(held_image, n_disk, rng))
    on_message(f"{n_wire} flips on the wire")
    counts.append(_flip_on_wire(image, n_wire, rng))
    tensors = image.tensors()
    for way, (save, load) in _torch_ways(folder).items():
        on_message(f"{n_disk} flips on disk: {way}")
        save(tensors)
        counts.append(_flip_peer_files(way, folder / way, load, tensors, n_disk, rng))
    return [asdict(tally) for tally in counts]


class _RandomImage:
    """A state of random bytes, as an image and as tensors."""

    def __init__(self, nbytes: int, rng: random.Random) -> None:
        n_tensors = max(nbytes // _TENSOR_BYTES, 1)
        size = nbytes // n_tensors // 4
        specs = [
            TensorSpec(f"tensor{index:04}", "F32", (size,), 4 * size, (0,), (size,))
            for index in range(n_tensors)
        ]
        self.layout = plan_image(Shard(0, 1), specs, 1024)
        self.bytes = bytearray(self.layout.nbytes)
        begin = len(self.layout.header)
        self.bytes[:begin] = self.layout.header
        self.bytes[begin:] = rng.randbytes(self.layout.nbytes - begin)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the same values as tensors, each with memory of its own."""
        return {
            placed.spec.name: torch.frombuffer(
                bytearray(self.bytes[placed.begin : placed.end]), dtype=torch.int32
            )
            for placed in self.layout.tensors
            if placed.spec.dtype == "F32"
        }


class _HeldImage:
    """The image in a keeper and in its directory."""

    def __init__(self, image: _RandomImage, folder: Path) -> None:
        self.image = image
        self.directory = folder / "flips"
        self._socket, self._end = start_keeper(folder / "keeper")
        self._policy = CheckpointPolicy(directory=str(self.directory), persist_every_s=0.0)
        keeper = connect_only_rank(self._socket)
        keeper.set_policy(self._policy)
        keeper.restore_point(_DEADLINE_S)
        slots = keeper.reserve(image.layout, slots=2).slots
        lease = wait_until(lambda: _as_lease(keeper.acquire(1)), _DEADLINE_S, "a lease")
        self.memory = slots[lease.slot]
        self.memory.view[:] = image.bytes
        keeper.mark_written(lease)
        link = KeeperClient.connect(self._socket)
        wait_until(lambda: link.stats()["persisted"], _DEADLINE_S, "the state on disk")
        link.close()
        keeper.close()
        # It is read back once, before the flips: what is damaged by then is removed.
        store = open_store(str(self.directory))
        wait_until(
            lambda: all(stored.is_verified for stored in store.list_states()),
            _DEADLINE_S,
            "the state read back",
        )

    def offers_memory_copy(self) -> bool:
        """Say whether the keeper offers the copy in memory and a worker finds it intact.

        The worker has mapped it before, as under ``gpuops run``.
        """
        mapped = MappedImages(self._socket, rank=0, world=1)
        mapped.wait()
        keeper = connect_only_rank(self._socket)
        try:
            keeper.set_policy(self._policy)
            offer = keeper.restore_point(_DEADLINE_S)
            if offer is None or offer.tier is not Tier.MEMORY:
                return False
            image = keeper.open_shard(offer, self.image.layout.shard)
            assert isinstance(image, HashedImage)
            memory = mapped.take(image)
            assert memory is not None
            image.copy_from(memory)
            with image, suppress(CorruptError):
                image.ensure([(0, image.nbytes)])
                return True
            return False
        finally:
            keeper.close()
            mapped.close()

    def close(self) -> None:
        """End the keeper."""
        self._end()


def _as_lease(answer: object) -> Lease | None:
    return answer if isinstance(answer, Lease) else None


def _flip_in_memory(held_image: _HeldImage, n_flips: int, rng: random.Random) -> FlipCounts:
    counts = FlipCounts("slot", "gpuops")
    for number in range(n_flips):
        at, bit = rng.randrange(held_image.memory.nbytes), 1 << rng.randrange(8)
        if number % _CONTROL_EVERY == 0 and not held_image.offers_memory_copy():
            counts.alarms += 1
        held_image.memory.view[at] ^= bit
        is_served = held_image.offers_memory_copy()
        held_image.memory.view[at] ^= bit
        _count(counts, is_found=not is_served)
    return counts


def _flip_on_disk(held_image: _HeldImage, n_flips: int, rng: random.Random) -> FlipCounts:
    counts = FlipCounts("disk", "gpuops")
    store = open_store(str(held_image.directory))
    state = store.scan().states[0].state
    (folder,) = [path for path in held_image.directory.iterdir() if path.name == state.name]

    def is_refused() -> bool:
        survey = store.scan()
        return bool(survey.damaged) or bool(verify_state(store, state))

    for number in range(n_flips):
        if number % _CONTROL_EVERY == 0 and is_refused():
            counts.alarms += 1
        with _flipped(folder, rng):
            _count(counts, is_found=is_refused())
    return counts


class _SingleCopySource:
    """A source that has one copy."""

    def __init__(self, copy: ShardCopy, pinned: PinnedCopy) -> None:
        self._copy, self._pinned = copy, pinned

    def open(self, state: StateId, shard: Shard) -> PinnedCopy | None:
        """Return the copy, if that is the one."""
        return self._pinned if (state, shard) == (self._copy.state, self._copy.shard) else None


def _flip_on_wire(image: _RandomImage, n_flips: int, rng: random.Random) -> FlipCounts:
    counts = FlipCounts("wire", "gpuops")
    memory = SharedBuffer.create("gpuops-bench", len(image.bytes))
    view = memory.view
    view[:] = image.bytes
    digest = compute_digest(view)
    state, shard = StateId(1, 1), Shard(0, 1)
    copy = ShardCopy(state, shard, image.layout.header_hash, digest, Tier.PEER, "bench")
    job = JobCredentials("bench", "bench", epoch=1)
    pinned = PinnedCopy(memory.fd, digest, view=view)
    pace = SendPace(None, SystemClock())
    server = TransferServer(
        ("127.0.0.1", 0), job, _SingleCopySource(copy, pinned), None, pace, TransferLimits()
    )
    target = bytearray(len(view))
    options = TransferOptions(deadline_s=_DEADLINE_S, n_connections=1)
    try:
        for _ in range(n_flips):
            target[:] = bytes(len(target))
            with _FlippingProxy(
                server.port, rng.randrange(len(view)), 1 << rng.randrange(8)
            ) as proxy:
                fetched = fetch(
                    [KeeperAddress("bench", "127.0.0.1", proxy.port)],
                    job,
                    copy,
                    memoryview(target),
                    options,
                )
            if not proxy.has_flipped:
                raise BenchError("a bit was to be flipped on the wire, and was not")
            is_right = target == view
            is_noticed = fetched.n_damaged > 0 or bool(fetched.failed) or proxy.n_connections > 1
            _count(counts, is_found=is_right and is_noticed, is_right=is_right)
    finally:
        server.close()
        memory.close()
    return counts


class _FlippingProxy:
    """Hands everything on to *port*; flips one bit of the byte *at* of what comes back."""

    def __init__(self, port: int, at: int, bit: int) -> None:
        self._target, self._at, self._bit = port, at, bit
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self.port: int = self._listener.getsockname()[1]
        self.has_flipped = False
        self.n_connections = 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_why: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                client, _ = self._listener.accept()
                self.n_connections += 1
                thread = threading.Thread(target=self._serve, args=(client,))
                self._threads.append(thread)
                thread.start()

    def _serve(self, client: socket.socket) -> None:
        with (
            client,
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self._target), 10) as server,
        ):
            while not self._stop.is_set():
                for side in select.select([client, server], [], [], 0.05)[0]:
                    data = side.recv(2**18)
                    if not data:
                        return
                    if side is client:
                        server.sendall(data)
                    else:
                        client.sendall(self._flip_in(data))

    def _flip_in(self, data: bytes) -> bytes:
        at, self._at = self._at, self._at - len(data)
        if not 0 <= at < len(data):
            return data
        spoilt = bytearray(data)
        spoilt[at] ^= self._bit
        self.has_flipped = True
        return bytes(spoilt)


Tensors = dict[str, torch.Tensor]
SaveAndLoad = tuple[Callable[[Tensors], None], Callable[[Tensors], Tensors]]


def _torch_ways(folder: Path) -> dict[str, SaveAndLoad]:
    """Return how the others save and load; each saves into ``folder / name``."""

    def save_dcp(tensors: Tensors) -> None:
        dcp_save(tensors, checkpoint_id=folder / "DCP", no_dist=True)

    def load_dcp(like: Tensors) -> Tensors:
        found: Tensors = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
        dcp_load(found, checkpoint_id=folder / "DCP", no_dist=True)
        return found

    def save_torch(tensors: Tensors) -> None:
        (folder / "torch.save").mkdir()
        torch.save(tensors, folder / "torch.save" / "state.pt")

    def load_torch(_like: Tensors) -> Tensors:
        found: Tensors = torch.load(folder / "torch.save" / "state.pt")
        return found

    def save_safetensors(tensors: Tensors) -> None:
        (folder / "safetensors").mkdir()
        save_file(tensors, folder / "safetensors" / "state.safetensors")

    def load_safetensors(_like: Tensors) -> Tensors:
        return load_file(folder / "safetensors" / "state.safetensors")

    return {
        "DCP": (save_dcp, load_dcp),
        "torch.save": (save_torch, load_torch),
        "safetensors": (save_safetensors, load_safetensors),
    }


def _flip_peer_files(
    way: str,
    folder: Path,
    load: Callable[[Tensors], Tensors],
    tensors: Tensors,
    n_flips: int,
    rng: random.Random,
) -> FlipCounts:
    counts = FlipCounts("disk", way)
    for _ in range(n_flips):
        with _flipped(folder, rng), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = load(tensors)
            except (Exception, CheckpointException):  # noqa: BLE001 boundary: it has noticed
                _count(counts, is_found=True)
                continue
            # Before the bit is flipped back: some of them map the file.
            is_right = found.keys() == tensors.keys() and all(
                torch.equal(found[name], tensor) for name, tensor in tensors.items()
            )
        _count(counts, is_found=False, is_right=is_right)
    shutil.rmtree(folder)
    return counts


@contextlib.contextmanager
def _flipped(folder: Path, rng: random.Random) -> Iterator[None]:
    """Flip one random bit of all that is in *folder*, and back again."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = [path.stat().st_size for path in files]
    (path,) = rng.choices(files, weights=sizes)
    at, bit = rng.randrange(path.stat().st_size), 1 << rng.randrange(8)
    _flip(path, at, bit)
    try:
        yield
    finally:
        _flip(path, at, bit)


def _flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ bit]))


def _count(counts: FlipCounts, *, is_found: bool, is_right: bool = False) -> None:
    counts.flips += 1
    counts.found += is_found
    counts.harmless += is_right and not is_found
    counts.silent += not is_found and not is_right
