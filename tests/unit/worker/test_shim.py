"""Under the shim a program sees, says and returns what it does under plain Python."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

import gpuops.worker.shim
from gpuops.host.process.executable import REMEDIES

SHIM = gpuops.worker.shim.__file__
SEEN = """
import sys, json
print(sys.argv, __name__, __file__, __package__, __spec__ and __spec__.name, sys.path)
print(sorted(globals()), type(__loader__).__name__, __doc__, sys.flags.safe_path)
print(sys.modules["__main__"].__dict__ is globals(), sys._getframe().f_code.co_filename)
"""
ENDINGS = {
    "end": "print('end')",
    "raise": "def f():\n    raise ValueError('x')\nf()",
    "chain": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise RuntimeError('y') from e",
    "exit3": "import sys\nsys.exit(3)",
    "exit text": "import sys\nsys.exit('bye')",
    "exit none": "import sys\nsys.exit()",
    "syntax": "if:\n",
    "interrupted": "raise KeyboardInterrupt",
    "hook": "import sys\nsys.excepthook = lambda *a: print('mine', a[0], a[2].tb_lineno)\n1 / 0",
    "group": "raise ExceptionGroup('g', [ValueError(1), TypeError(2)])",
    "atexit": (
        "import atexit, sys\nclass A: pass\n"
        "atexit.register(lambda: print(sys.modules['__main__'].A, A))"
    ),
    "thread": (
        "import threading, time, sys\ndef late():\n"
        "    time.sleep(0.05)\n    print(sys.modules['__main__'].late is late)\n"
        "threading.Thread(target=late).start()"
    ),
    "pickle": "import pickle\nclass A: pass\nprint(pickle.loads(pickle.dumps(A())).__class__)",
    "spawn": (
        "import multiprocessing as mp\ndef f(x): print(x, __name__)\n"
        "if __name__ == '__main__':\n    c = mp.get_context('spawn')\n"
        "    p = c.Process(target=f, args=(1,)); p.start(); p.join(); print(p.exitcode)"
    ),
}


def both(tmp_path, *words, env=None, flags=()):
    """Return (code, out, err) of the same words under plain Python and under the shim."""
    results = []
    for front in ([], [SHIM]):
        done = subprocess.run(
            [sys.executable, *flags, *front, *words],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", **(env or {})},
            capture_output=True,
            text=True,
            check=False,
        )
        results.append((done.returncode, done.stdout, done.stderr))
    return results


@pytest.mark.parametrize("body", ENDINGS.values(), ids=ENDINGS.keys())
def test_a_script_ends_as_under_plain_python(tmp_path, body):
    (tmp_path / "job.py").write_text(body)

    plain, shimmed = both(tmp_path, "job.py", "-x", "--flag")

    assert shimmed == plain


@pytest.mark.parametrize("rank", ["0", "", "one"])
def test_a_script_runs_where_what_should_be_mapped_ahead_is_not_there(tmp_path, rank):
    (tmp_path / "job.py").write_text("import ctypes\nprint('end')")
    env = {
        "GPUOPS_HAS_STATE": "1",
        "GPUOPS_KEEPER": str(tmp_path / "keeper.sock"),
        "WORLD_SIZE": "1",
    }

    plain, shimmed = both(tmp_path, "job.py", env={**env, "RANK": rank} if rank else env)

    assert shimmed == plain


@pytest.mark.parametrize("how", ["job.py", "./job.py", "sub/link.py", "sub/../job.py"])
def test_a_script_sees_the_same_surroundings(tmp_path, how):
    (tmp_path / "job.py").write_text(f'"""doc"""\n{SEEN}')
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "link.py").symlink_to(tmp_path / "job.py")

    plain, shimmed = both(tmp_path, how, "a b", "")

    assert plain[0] == 0
    assert shimmed == plain


@pytest.mark.parametrize("body", [SEEN, ENDINGS["raise"], ENDINGS["exit3"]])
def test_a_module_runs_as_with_dash_m(tmp_path, body):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "job.py").write_text(body)

    plain, shimmed = both(tmp_path, "-m", "package.job", "a")

    assert shimmed == plain


def test_a_missing_module_is_said_as_python_says_it(tmp_path):
    plain, shimmed = both(tmp_path, "-m", "no_such_module")

    assert shimmed == plain


def test_safe_path_is_honoured(tmp_path):
    (tmp_path / "job.py").write_text(SEEN)

    plain, shimmed = both(tmp_path, "job.py", env={"PYTHONSAFEPATH": "1"})

    assert shimmed == plain


def test_modules_beside_the_script_do_not_shadow_what_the_shim_imports(tmp_path):
    for name in ("dataclasses", "json", "ctypes", "gpuops", "mmap"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
    (tmp_path / "job.py").write_text("print('fine')")

    _plain, shimmed = both(tmp_path, "job.py")

    assert shimmed == (0, "fine\n", "")


def test_a_zip_file_runs_like_a_script(tmp_path):
    from zipfile import ZipFile

    with ZipFile(tmp_path / "job.zip", "w") as archive:
        archive.writestr("__main__.py", "import sys; print(sys.argv, __name__)")

    plain, shimmed = both(tmp_path, "job.zip", "a")

    assert shimmed == plain


def test_the_program_of_exec_gets_its_words_and_its_exit_code(tmp_path):
    done = subprocess.run(
        [sys.executable, SHIM, "--exec", "sh", "-c", "echo $0 $1; exit 7", "a", "b"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (7, "a b\n")


def test_the_shim_does_not_import_torch(tmp_path):
    (tmp_path / "job.py").write_text("import sys; print('torch' in sys.modules)")

    _plain, shimmed = both(tmp_path, "job.py", env={"RANK": "0", "GPUOPS_GENERATION": "0"})

    assert shimmed == (0, "False\n", "")


def test_an_exception_is_noted_once_for_us_and_once_for_torch(tmp_path):
    import json

    (tmp_path / "job.py").write_text(ENDINGS["raise"])
    files = {
        "GPUOPS_ERROR_FILE": str(tmp_path / "exception.json"),
        "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"),
    }

    both(tmp_path, "job.py", env=files)

    ours = json.loads((tmp_path / "exception.json").read_text())
    torchs = json.loads((tmp_path / "error.json").read_text())
    assert (ours["type"], ours["message"]) == ("ValueError", "x")
    assert ours["traceback"][0] == "Traceback (most recent call last):"
    assert "job.py" in ours["traceback"][1]
    assert torchs["message"]["message"] == "ValueError: x"
    assert "job.py" in torchs["message"]["extraInfo"]["py_callstack"]


def test_an_orphan_whose_agent_is_dead_ends_at_once(tmp_path):
    (tmp_path / "job.py").write_text("print('ran')")
    gone = subprocess.Popen(["true"])
    gone.wait()

    done = subprocess.run(
        [sys.executable, SHIM, "job.py"],
        cwd=tmp_path,
        env={"GPUOPS_AGENT_PID": str(gone.pid)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (-9, "")


def test_disabled_the_shim_prepares_nothing(tmp_path):
    (tmp_path / "job.py").write_text("import faulthandler; print(faulthandler.is_enabled())")
    ring = tmp_path / "ring"
    env = {"GPUOPS_DISABLE": "1", "GPUOPS_RING": str(ring), "GPUOPS_GENERATION": "0", "RANK": "0"}

    plain, shimmed = both(tmp_path, "job.py", env=env)

    assert shimmed == plain
    assert not ring.exists()
    assert Path(SHIM).exists()


@pytest.mark.parametrize(
    ("text", "code", "why"),
    [
        (b"#!/nonexistent/sh\n", 127, "its interpreter does not exist; correct its first line"),
        (b"\x7fELF no program", 126, f"Exec format error; {REMEDIES[errno.ENOEXEC]}"),
    ],
    ids=["no interpreter", "corrupt"],
)
def test_a_program_that_cannot_be_executed_ends_as_in_a_shell(tmp_path, text, code, why):
    program = tmp_path / "bad"
    program.write_bytes(text)
    program.chmod(0o755)
    done = subprocess.run(
        [sys.executable, SHIM, "--exec", str(program)], capture_output=True, text=True, check=False
    )

    assert done.returncode == code
    assert done.stderr == f"cannot execute {program}: {why}\n"
