"""Thousands of agents without workers: each with its two connections and one held heartbeat.

They speak the real protocol to a real server, from one event loop. What they see is counted here,
on the agents' side.
"""

import asyncio
import secrets
import time
from dataclasses import dataclass, field

from gpuops.control import signing
from gpuops.control.record import RECORD_KEY, pack
from gpuops.control.tcp import wire
from gpuops.host.net import frames
from gpuops.host.net import job_proof as proof

# Not all at once: the server lets so many strangers in from one address.
OPENING_MAX = 128
PROGRESS = {"step": 123_456, "phase": "train", "since_s": 12.5, "rank": 4095}


class Agent(asyncio.Protocol):
    """One agent: it beats, and notes when it saw which version of the record."""

    def __init__(self, crowd, name):
        self.crowd = crowd
        self.name = name
        self.seen = 0
        self.number = 0
        self.n_requests = self.bytes_out = self.bytes_in = 0
        self.entered = asyncio.get_running_loop().create_future()
        self.buffer = bytearray()
        self.hear = self.on_challenge

    def connection_made(self, transport):
        self.transport = transport
        run = signing.run_digest(self.crowd.run_key)
        hello = wire.ControlHello(run, secrets.token_bytes(16), 1, proof.nonce()).to_bytes()
        self.shake = hello
        self.say(frames.framed(hello))

    def connection_lost(self, exc):
        if not self.entered.done():
            self.entered.set_exception(exc or ConnectionResetError("turned away"))
        elif not self.crowd.is_over:
            self.crowd.lost += 1

    def say(self, frame):
        self.bytes_out += len(frame)
        self.transport.write(frame)

    def data_received(self, data):
        self.bytes_in += len(data)
        self.buffer += data
        while (body := frames.take_frame(self.buffer, wire.FRAME_BYTES_MAX)) is not None:
            self.hear(body)

    def on_challenge(self, body):
        self.shake = proof.JobHandshake(self.crowd.key, self.shake + body)
        self.say(frames.framed(self.shake.proof("client")))
        self.hear = self.on_welcome

    def on_welcome(self, body):
        code, theirs = proof.read_welcome(body)
        assert code is proof.ProofWelcome.ACCEPTED
        assert proof.same(theirs, self.shake.proof("server"))
        self.ours, self.theirs = self.shake.channel("client"), self.shake.channel("server")
        self.entered.set_result(None)
        self.hear = self.on_answer

    def heartbeat(self):
        self.number += 1
        self.n_requests += 1
        value = pack({"seq": self.number, **PROGRESS})
        key, hold_s = f"run/alive/{self.name}", self.crowd.hold_s
        message = wire.ControlRequest(
            self.number, wire.Operation.HEARTBEAT, key, value, self.seen, RECORD_KEY, hold_s
        ).to_bytes()
        self.say(self.ours.frame(message))
        self.crowd.told.set()

    def on_answer(self, body):
        number, how, payload = wire.unpack_reply(self.theirs.message(body))
        assert (number, how) == (self.number, wire.ReplyKind.HEARTBEAT)
        watched = wire.unpack_heartbeat_reply(payload).watched
        if watched is not None:
            self.seen = watched.version
            self.crowd.saw(watched.version)
        if not self.crowd.is_over:
            self.heartbeat()


@dataclass
class Crowd:
    """Many agents of one run; ``seen_s`` is when the last of them saw a version (monotonic)."""

    port: int
    run_key: str
    token: str
    hold_s: float
    names: list
    agents: list = field(default_factory=list)
    seen: dict = field(default_factory=dict)
    seen_s: dict = field(default_factory=dict)
    is_over: bool = False
    lost: int = 0

    def __post_init__(self):
        self.key = signing.token_key(self.token)
        self.idle = []
        self.told = asyncio.Event()

    def saw(self, version):
        self.seen[version] = self.seen.get(version, 0) + 1
        if self.seen[version] == len(self.names):
            self.seen_s[version] = time.monotonic()
            self.told.set()

    async def all_saw(self, version):
        """Return when (monotonic) the last one saw *version*."""
        await self._until(lambda: version in self.seen_s)
        return self.seen_s[version]

    async def all_asked(self, requests):
        """Return once they have made so many requests together."""
        await self._until(lambda: self.counts()[0] >= requests)

    async def _until(self, is_so):
        while not is_so():
            self.told.clear()
            await self.told.wait()

    async def enter(self):
        """Connect all, then begin to beat, spread over one hold as they are after a while."""
        gate = asyncio.Semaphore(OPENING_MAX)

        async def one(name, keep):
            loop = asyncio.get_running_loop()
            async with gate:
                _, agent = await loop.create_connection(
                    lambda: Agent(self, name), "127.0.0.1", self.port
                )
                await agent.entered
                keep.append(agent)

        await asyncio.gather(*(one(name, self.agents) for name in self.names))
        # The line for other calls is open and silent.
        await asyncio.gather(*(one(name, self.idle) for name in self.names))
        loop = asyncio.get_running_loop()
        for place, agent in enumerate(self.agents):
            loop.call_later(self.hold_s * place / len(self.agents), agent.heartbeat)

    def counts(self):
        """Return requests, bytes sent and bytes received by all so far."""
        return [
            sum(getattr(agent, name) for agent in self.agents)
            for name in ("n_requests", "bytes_out", "bytes_in")
        ]

    def leave(self):
        """Close every connection."""
        self.is_over = True
        for agent in (*self.agents, *self.idle):
            agent.transport.abort()
