"""TLS of an etcd that the agents of a run start: whoever has the job's token is let in.

The token gives the key of a certificate authority, the same on every node, so that no key ever
travels. Each node signs a certificate for its own address with it and trusts that authority alone,
as a server, as a client and as a member.
"""

import hashlib
import os
import shutil
from base64 import encodebytes
from pathlib import Path

from gpuops.config.resolve import environ
from gpuops.control.store import ControlStoreError
from gpuops.host.net.job_proof import derived
from gpuops.host.process.command import run_bounded

OPENSSL_TIMEOUT_S = 20.0
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
# RFC 5915: a sequence of version 1, the 32 bytes of the private key, the curve P-256.
_KEY_HEAD = bytes.fromhex("30310201010420")
_KEY_TAIL = bytes.fromhex("a00a06082a8648ce3d030107")
_CONFIG = """\
[req]
distinguished_name = name
prompt = no
[name]
CN = gpuops {name}
[authority]
basicConstraints = critical,CA:TRUE
subjectKeyIdentifier = hash
[node]
basicConstraints = critical,CA:FALSE
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = IP:{address}
"""


def private_key(token: str) -> bytes:
    """Return the key that belongs to *token*, as PEM."""
    seed = derived("gpuops etcd authority", token)
    while not 0 < int.from_bytes(seed, "big") < _P256_ORDER:
        seed = hashlib.sha256(seed).digest()
    body = encodebytes(_KEY_HEAD + seed + _KEY_TAIL)
    return b"-----BEGIN EC PRIVATE KEY-----\n" + body + b"-----END EC PRIVATE KEY-----\n"


def write_credentials(folder: Path, token: str, address: str) -> dict[str, str]:
    """Write ``cacert``, ``cert`` and ``key`` of *address* into *folder*; return their files.

    Raises:
        ControlStoreError: openssl is missing, fails, or the folder cannot be written.
    """
    openssl = shutil.which("openssl")
    if openssl is None:
        raise ControlStoreError("openssl is not installed: it makes the certificates of etcd")
    files = {name: str(folder / f"{name}.pem") for name in ("cacert", "cert", "key")}
    try:
        with os.fdopen(os.open(files["key"], os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(private_key(token))
        configs = {}
        for name in ("authority", "node"):
            configs[name] = str(folder / f"{name}.cnf")
            text = _CONFIG.format(name=name, address=address)
            Path(configs[name]).write_text(text, encoding="ascii")
    except OSError as exc:
        raise ControlStoreError(f"cannot write the certificates of etcd: {exc}") from exc
    request = str(folder / "request.pem")
    key, days = ["-key", files["key"]], ["-days", "3650", "-sha256"]
    authority = ["-config", configs["authority"], "-extensions", "authority"]
    signer = ["-CA", files["cacert"], "-CAkey", files["key"], "-set_serial", "1"]
    extensions = ["-extfile", configs["node"], "-extensions", "node"]
    for arguments in (
        ["req", "-x509", "-new", *key, *days, *authority, "-out", files["cacert"]],
        ["req", "-new", *key, "-config", configs["node"], "-out", request],
        ["x509", "-req", "-in", request, *signer, *days, *extensions, "-out", files["cert"]],
    ):
        _run([openssl, *arguments])
    return files


def _run(command: list[str]) -> None:
    end = run_bounded(command, environ(), OPENSSL_TIMEOUT_S, lambda: False)
    if end is None or end.exit_code != 0:
        text = "" if end is None else end.errors.decode(errors="replace")
        last = (text.strip().splitlines() or ["no message"])[-1]
        code = None if end is None else end.exit_code
        raise ControlStoreError(
            f"openssl cannot make the certificates of etcd: exit {code}, {last}"
        )
