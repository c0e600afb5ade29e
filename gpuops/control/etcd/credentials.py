"""TLS of an etcd that the agents of a run start: whoever has the job's token is let in.

The token gives the key of a certificate authority, the same on every node, so that no key ever
travels. Each node signs a certificate for its own address with it and trusts that authority alone,
as a server, as a client and as a member.
"""

import hashlib
import os
import shutil
from base64 import encodebytes
from collections.abc import Mapping
from pathlib import Path

from gpuops.config.resolve import environ
from gpuops.control.store import ControlStoreError
from gpuops.host.net.job_proof import derived
from gpuops.host.process.command import run_bounded

OPENSSL_TIMEOUT_S = 20.0
_FILES = ("cacert", "cert", "key")
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
# RFC 5915: a sequence of version 1, the 32 bytes of the private key, the curve P-256.
_KEY_HEAD = bytes.fromhex("30310201010420")
_KEY_TAIL = bytes.fromhex("a00a06082a8648ce3d030107")
# Variables, since the path of a folder may hold what openssl expands.
_FOLDER, _NAME, _ADDRESS = "gpuops_folder", "gpuops_name", "gpuops_address"
# Valid whatever the clock of a host shows: what protects is the token.
_CONFIG = f"""\
[req]
distinguished_name = name
prompt = no
[name]
CN = gpuops $ENV::{_NAME}
[ca]
default_ca = signer
[signer]
database = $ENV::{_FOLDER}/index
new_certs_dir = $ENV::{_FOLDER}
rand_serial = yes
unique_subject = no
default_md = sha256
default_startdate = 000101000000Z
default_enddate = 491231235959Z
policy = policy
[policy]
commonName = supplied
[authority]
basicConstraints = critical,CA:TRUE
subjectKeyIdentifier = hash
[node]
basicConstraints = critical,CA:FALSE
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = IP:$ENV::{_ADDRESS}
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
    files = {name: str(folder / f"{name}.pem") for name in _FILES}
    config, request = folder / "openssl.cnf", str(folder / "request.pem")
    try:
        with os.fdopen(os.open(files["key"], os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(private_key(token))
        config.write_text(_CONFIG, encoding="ascii")
        (folder / "index").touch()
    except OSError as exc:
        raise ControlStoreError(f"cannot write the certificates of etcd: {exc}") from exc
    for name, issuer, out in (
        ("authority", ["-selfsign"], files["cacert"]),
        ("node", ["-cert", files["cacert"]], files["cert"]),
    ):
        env = {**environ(), _FOLDER: str(folder), _NAME: name, _ADDRESS: address}
        with_config = ["-config", str(config)]
        _run([openssl, "req", "-new", "-key", files["key"], *with_config, "-out", request], env)
        sign = ["ca", "-batch", "-notext", *issuer, "-keyfile", files["key"], *with_config]
        _run([openssl, *sign, "-extensions", name, "-in", request, "-out", out], env)
    return files


def copy_credentials(source: Path, folder: Path) -> dict[str, str]:
    """Copy what `write_credentials` wrote into *source* to *folder*; return the files there.

    Raises:
        OSError: They are not there, or cannot be written.
    """
    return {name: str(shutil.copy(source / f"{name}.pem", folder)) for name in _FILES}


def _run(command: list[str], env: Mapping[str, str]) -> None:
    end = run_bounded(command, env, OPENSSL_TIMEOUT_S, lambda: False)
    if end is None or end.exit_code != 0:
        text = "" if end is None else end.errors.decode(errors="replace")
        last = (text.strip().splitlines() or ["no message"])[-1]
        code = None if end is None else end.exit_code
        raise ControlStoreError(
            f"openssl cannot make the certificates of etcd: exit {code}, {last}"
        )
