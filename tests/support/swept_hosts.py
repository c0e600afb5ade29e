"""``gpuops sweep --hosts`` over hosts in namespaces, which a script stands in for ssh to reach."""

import json
import os
import subprocess
import sys
import threading
import time

PAUSE = threading.Event()


def fake_ssh(hosts, folder, preload):
    """Return a program that runs a command in the namespace of the host with that address.

    *preload*: by address, the library that all programs of that host load.
    """
    lines = ["#!/bin/sh", "host=$1; shift", "case $host in"]
    for host in hosts:
        if host.namespace is None:
            continue
        settings = [f"SLURMD_NODENAME={host.name}", f"GPUOPS_STATE={host.folder}/state"]
        settings += [f"LD_PRELOAD={preload[host.address]}"] if host.address in preload else []
        words = ["ip", "netns", "exec", host.namespace, "env", *settings]
        lines.append(f'{host.address}) exec {" ".join(words)} "$@";;')
    lines += ["*) echo 'no route to host' >&2; exit 255;;", "esac"]
    program = folder / "ssh"
    program.write_text("\n".join(lines) + "\n")
    program.chmod(0o755)
    return program


def run(folder, *words):
    """Return the finished ``gpuops *words*`` of the machine around the hosts."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("GPUOPS_")}
    places = {f"GPUOPS_{name}": str(folder / name) for name in ("STATE", "SPOOL")}
    return subprocess.run(
        [sys.executable, "-m", "gpuops", *words],
        env={**kept, **places, "GPUOPS_STORE": store_url(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def store_url(folder):
    return f"sqlite:///{folder}/store.db"


def sweep_of(hosts, folder, *words, preload=None):
    """Return the finished sweep of *hosts*; *preload*: see `fake_ssh`."""
    names = ",".join(host.address for host in hosts)
    ssh = fake_ssh(hosts, folder, preload or {})
    done = run(
        folder,
        *("sweep", "--hosts", names, "--ssh", str(ssh), "--remote", f"{sys.executable} -m gpuops"),
        *("--no-check", "--size", "2MiB", "--seconds", "0.5", *words),
    )
    assert done.stdout, done.stderr
    return done


def swept(hosts, folder, *words, preload=None):
    """Return the exit code of a sweep of *hosts* and what it printed as JSON."""
    done = sweep_of(hosts, folder, "--json", *words, preload=preload)
    return done.returncode, json.loads(done.stdout)


def shown(folder, *words):
    """Return what ``gpuops *words --json`` prints, once the whole sweep is in the store."""
    until = time.monotonic() + 120
    while (done := run(folder, *words, "--json")).returncode or done.stderr:
        assert time.monotonic() < until, done.stderr
        PAUSE.wait(0.5)
    return json.loads(done.stdout)
