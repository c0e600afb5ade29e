"""Programs of a burn-in that print planted results at once, in the real commands' processes."""

SITE = """
import os, signal, sys, time
words = sys.orig_argv
if "gpuops.worker.burnin" in words:
    from gpuops.burnin.results import Measurement, ProgramEnd, WrongResult, to_line
    from gpuops.model import Entity, EntityKind
    if os.environ["PLANTED"] == "late":  # as torch may be on a cold disk
        time.sleep(600)
    test = words[words.index("gpuops.worker.burnin") + 1]
    kind, _, name = words[words.index("--part") + 1].partition(":")
    about = {"test": test, "part": Entity(EntityKind(kind), name)}
    records = [
        Measurement(**about, parameters={"of": "a plant"}, values=(9.0,), unit="GFLOP/s"),
        ProgramEnd(test=test),
    ]
    if os.environ["PLANTED"] == "wrong":
        records.insert(0, WrongResult(**about, parameters="fp32", message="3 elements differ"))
    number, is_in, of_test = os.environ["PLANTED"].partition(" in ")
    if is_in and of_test == test:  # interrupts the burn-in, and goes on
        os.makedirs(os.path.dirname(__file__) + f"/pids/{os.getpid()}")
        os.kill(os.getppid(), signal.Signals[number])
        time.sleep(600)
    print("".join(to_line(record) + "\\n" for record in records), flush=True)
    os._exit(0)
if "run" in words:  # whether the burn-in ends in time is no matter of these tests
    from gpuops.agent.launch.plan import LaunchPlan
    LaunchPlan.__init__.__kwdefaults__["preflight_deadline_s"] = (
        5.0 if os.environ["PLANTED"] == "late" else 90.0
    )
"""


def plant(folder, planted):
    """Return the environment in which burn-ins are *planted*: ``right``, ``wrong`` or ``late``.

    ``SIGINT in hbm``: that test interrupts the burn-in.
    """
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(SITE)
    return {"PYTHONPATH": str(folder), "PLANTED": planted}
