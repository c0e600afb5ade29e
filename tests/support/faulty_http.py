"""A proxy before an HTTP server that, as told, answers 500, resets, cuts short or is silent."""

import contextlib
import http.client
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# Of one connection only, not of what is asked (RFC 9110, 7.6.1).
_OF_THE_HOP = {"connection", "keep-alive", "transfer-encoding", "expect", "te", "upgrade"}


_ERROR = b"<Error><Code>InternalError</Code></Error>"


class FaultyHttp:
    """Listens on *port* of its own for the server on *target*.

    ``plan(method, path)`` says what a request meets: None, a status such as 500, ``"reset"``,
    ``"reset late"`` and ``"500 late"`` (after the server did what was asked), ``"cut"`` (half of
    the answer) or ``"silent"``. ``met`` counts what was met.
    """

    def __init__(self, target):
        self.target = target
        self.plan = lambda _method, _path: None
        self.met = []
        self.ends = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.faulty = self
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self):
        """End every connection."""
        self.ends.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60

    def log_message(self, *_):
        pass

    def _serve(self):
        faulty = self.server.faulty
        body = self._body()
        fault = faulty.plan(self.command, self.path)
        if fault is not None:
            faulty.met.append(fault)
        if fault == "silent":
            faulty.ends.wait(60)
            self._reset()
        elif fault == "reset":
            self._reset()
        elif isinstance(fault, int):
            self._answer(fault, [], _ERROR)
        else:
            status, headers, answer = self._ask(body)
            if fault == "reset late":
                self._reset()
            elif fault == "500 late":
                self._answer(500, [], _ERROR)
            elif fault == "cut" and answer:
                self._answer(status, headers, answer, n_sent=len(answer) // 2)
                self._reset()
            else:
                self._answer(status, headers, answer)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815 as http.server calls them

    def _body(self):
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(parts)

    def _ask(self, body):
        connection = http.client.HTTPConnection("127.0.0.1", self.server.faulty.target, timeout=30)
        headers = {
            name: value for name, value in self.headers.items() if name.lower() not in _OF_THE_HOP
        }
        headers["Content-Length"] = str(len(body))
        with contextlib.closing(connection):
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            kept = [
                (name, value)
                for name, value in answer.getheaders()
                if name.lower() not in _OF_THE_HOP | {"content-length"}
            ]
            length = answer.getheader("Content-Length")
            content = answer.read()
            if self.command == "HEAD" and length:
                kept.append(("Content-Length", length))
            return answer.status, kept, content

    def _answer(self, status, headers, content, n_sent=None):
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if not any(name.lower() == "content-length" for name, _ in headers):
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[:n_sent])

    def _reset(self):
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.shutdown(socket.SHUT_RD)
        with contextlib.suppress(OSError):
            self.connection.close()
