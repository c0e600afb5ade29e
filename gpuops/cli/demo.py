"""``gpuops demo``."""

import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

import click

from gpuops.config.resolve import environ
from gpuops.demo.scenario import make_plan, run_demo
from gpuops.errors import UnsupportedTorchError, UsageError

MARKER = ".gpuops-demo"


@click.command(epilog="Example: gpuops demo --dir /tmp/demo --seed 3")
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Keep everything here.")
@click.option("--seed", default=7, show_default=True, help="Which rank dies, and at which step.")
@click.option("--steps", default=240, show_default=True, type=click.IntRange(min=30))
def demo(folder: Path | None, seed: int, steps: int) -> int:
    """Train a small transformer, kill a rank, recover, and report, on this machine."""
    if find_spec("torch") is None:
        raise UnsupportedTorchError(
            "the demo trains with torch, which is not installed here; "
            "try: pip install 'torch>=2.8' numpy"
        )
    folder = (
        Path(tempfile.mkdtemp(prefix="gpuops-demo-")) if folder is None else _empty_folder(folder)
    )
    (folder / MARKER).touch()
    return run_demo(make_plan(seed, steps), folder.resolve(), environ(), _print_line)


def _empty_folder(folder: Path) -> Path:
    """Return *folder*, emptied only if it is of an earlier demo."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARKER).exists():
            raise UsageError(f"--dir {folder} is not empty and not an earlier demo's; name another")
        shutil.rmtree(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise UsageError(
            f"cannot make the demo's folder {folder}: {os.strerror(exc.errno or 0)}"
        ) from exc
    return folder


def _print_line(text: str) -> None:
    click.secho(f"\n{text}" if text[:1].isdigit() or text[:1].isupper() else text, bold=True)
