"""perftest: ``ib_write_bw --out_json`` from one InfiniBand port of this node to another."""

import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from gpuops.errors import ProbeError
from gpuops.host.infiniband import Port
from gpuops.host.tools.run import ToolOutput, ToolRate, measure, rate_of, run_tool
from gpuops.model import Entity, EntityKind

_GBIT_PER_GB = 8
_LISTEN_S, _PAUSE_S = 10.0, 0.5

PortPair = tuple[Port, Port]


def port_pairs(ports: Sequence[Port]) -> list[PortPair]:
    """Return each port with the next one: active InfiniBand ports of the highest rate, in a ring.

    Slower ones are rarely of the same fabric, and how Ethernet ports of one node reach each other
    depends on its routes. There are none on a node with one adapter.
    """
    usable = [port for port in ports if port.is_active and port.link_layer == "InfiniBand"]
    fastest = max((port.rate_gbs or 0.0 for port in usable), default=0.0)
    ring = [port for port in usable if port.rate_gbs == fastest]
    several = len({port.device for port in ring}) > 1
    return list(zip(ring, ring[1:] + ring[:1], strict=True)) if several else []


def measure_ports(tool: str, pair: PortPair, seconds: float) -> ToolOutput:
    """Measure writes from the first port of *pair* to the second; see `run.measure`."""
    version = run_tool([tool, "-V"], 0.0, exit_codes=range(256)).strip()
    with socket.create_server(("127.0.0.1", 0)) as free:
        tcp_port = str(free.getsockname()[1])
    words = ("-p", tcp_port, "-F", "--report_gbits", "-D", str(max(round(seconds), 1)))
    argv = [[tool, "-d", port.device, "-i", str(port.number), *words] for port in pair]
    done = threading.Event()

    def serve() -> None:
        with suppress(ProbeError):  # the client says what came of it
            run_tool(argv[1], seconds, is_over=done.is_set)

    server, ends_s = threading.Thread(target=serve), time.monotonic() + _LISTEN_S
    server.start()
    try:
        while True:
            try:
                return measure(
                    lambda path: [*argv[0], "--out_json", f"--out_json_file={path}", "127.0.0.1"],
                    lambda found: parse(found, pair, version),
                    seconds,
                )
            except ProbeError:
                if time.monotonic() >= ends_s:
                    raise
                time.sleep(_PAUSE_S)  # perhaps the server does not listen yet
    finally:
        done.set()
        server.join()


def parse(document: Any, pair: PortPair, version: str) -> ToolOutput:  # noqa: ANN401 JSON
    """Return the rate of the first port of *pair*.

    Raises:
        LookupError, TypeError, ValueError: It is not as documented.
    """
    rate = rate_of(document["results"]["BW_average"]) / _GBIT_PER_GB
    parameters = {"tool": "ib_write_bw", "from": pair[0].name, "to": pair[1].name}
    rates = (ToolRate(parameters, (rate,), Entity(EntityKind.NIC, pair[0].guid)),)
    return ToolOutput(version.rpartition(" ")[2], rates)
