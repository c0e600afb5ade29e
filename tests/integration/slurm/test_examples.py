"""The sbatch examples in a real Slurm, with a program in gpuops' place that ends as it is told."""

import pytest
from support.slurm import SHIPPED, wait_until

pytestmark = [pytest.mark.quick_disk, pytest.mark.slurm, pytest.mark.cc, pytest.mark.timeout(240)]
EXAMPLES = SHIPPED / "examples"

# Every call leaves its words and its place; a link ends with the next code of its list.
STAND_IN = """\
#!/bin/sh
here={folder}/$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}
mkdir -p "$here"
echo "$GPUOPS_TOKEN" >"$here/token.$SLURM_PROCID"
env >"$here/env.$SLURM_PROCID"
echo "$*" >"$here/words.$SLURM_PROCID"
{body}
"""


@pytest.fixture
def job(cluster, tmp_path):
    """Return a function that submits an example, whose gpuops does *body*."""
    programs = tmp_path / "bin"
    programs.mkdir()

    def submit(name, body, *options):
        program = programs / "gpuops"
        program.write_text(STAND_IN.format(folder=tmp_path, body=body))
        program.chmod(0o755)
        out = ("-o", str(tmp_path / "out-%A-%a"))
        path = f"PATH={programs}:/usr/sbin:/usr/bin:/sbin:/bin"
        argv = ("sbatch", "--parsable", *out, f"--export=ALL,{path}", *options)
        return cluster._run(*argv, str(EXAMPLES / name)).stdout.strip()

    return submit


def calls(folder, what="words"):
    """Return what each task of each start of a job left, by start and task."""
    return {
        f"{path.parent.name}/{path.suffix[1:]}": path.read_text().strip()
        for path in sorted(folder.glob(f"*/{what}.*"))
    }


def test_every_example_parses_and_names_what_it_needs():
    examples = list(EXAMPLES.iterdir())
    assert examples
    for path in examples:
        text = path.read_text()
        assert text.startswith("#!/bin/bash\n")
        assert "srun --ntasks-per-node=1" in text
        assert 'exit "$code"' in text


def test_exit_85_starts_the_job_again_with_a_new_token(cluster, job, tmp_path):
    body = 'test -z "$SLURM_RESTART_COUNT" && exit 85; exit 0'
    job_id = job("elastic.sbatch", body)

    fields = cluster.finished(job_id, 120)

    assert (fields["JobState"], fields["ExitCode"], fields["Restarts"]) == ("COMPLETED", "0:0", "1")
    words = calls(tmp_path)
    tasks = [f"{job_id}.{start}/{task}" for start in (0, 1) for task in range(4)]
    assert list(words) == tasks
    assert set(words.values()) == {"run --spares=1 --min-nodes=2 --max-restarts=10/6h train.py"}
    tokens = calls(tmp_path, "token")
    assert all(len(token) == 64 for token in tokens.values())
    assert len({tokens[name] for name in tasks[:4]}) == 1
    assert tokens[tasks[0]] != tokens[tasks[4]]


@pytest.mark.parametrize("code", [pytest.param(93, marks=pytest.mark.soak), 86, 1])
def test_what_is_not_85_ends_the_job_with_its_code(cluster, job, code):
    fields = cluster.finished(job("elastic.sbatch", f"exit {code}"), 120)

    assert (fields["JobState"], fields["ExitCode"]) == ("FAILED", f"{code}:0")
    assert fields["Restarts"] == "0"


def test_the_notice_reaches_every_agent_and_not_the_shell(cluster, job, tmp_path):
    body = 'trap "exit 85" USR1\ntouch "$here/ready.$SLURM_PROCID"\nwhile :; do sleep 0.2; done\n'
    job_id = job("elastic.sbatch", f'test -n "$SLURM_RESTART_COUNT" && exit 0\n{body}')
    wait_until(lambda: len(list(tmp_path.glob("*/ready.*"))) == 4, "no agents")

    cluster._run("scancel", "--signal=USR1", job_id)

    fields = cluster.finished(job_id)
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1")


@pytest.mark.parametrize(
    ("last", "state"), [(93, "FAILED"), pytest.param(0, "COMPLETED", marks=pytest.mark.soak)]
)
def test_a_chain_goes_on_after_85_and_ends_at_93_and_at_0(cluster, job, tmp_path, last, state):
    body = f'test "$SLURM_ARRAY_TASK_ID" = 1 && exit 85; exit {last}'
    array = job("chain.sbatch", body)

    def over():
        shown = cluster._run("squeue", "-h", "-j", array, check=False).stdout.strip()
        return not shown

    wait_until(over, lambda: cluster._run("squeue").stdout, 120)
    ran = {name.partition(".")[0] for name in calls(tmp_path)}
    assert len(ran) == 2
    said = "".join(path.read_text() for path in sorted(tmp_path.glob("out-*")))
    assert "link 1 ended with 85: the next one goes on" in said
    assert f"ended with {last}: no further link" in said
    second = next(fields for link in ran if (fields := cluster.job(link))["ArrayTaskId"] == "2")
    assert second["JobState"] == state


@pytest.mark.parametrize(
    ("code", "state"), [(93, "CANCELLED"), pytest.param(0, "COMPLETED", marks=pytest.mark.soak)]
)
def test_what_waits_for_success_does_not_run_after_93(cluster, job, tmp_path, code, state):
    job_id = job("elastic.sbatch", f"exit {code}")
    after = cluster.submit(
        f"touch {tmp_path}/evaluated", f"--dependency=afterok:{job_id}", "--kill-on-invalid-dep=yes"
    )

    assert cluster.finished(after, 120)["JobState"] == state
    assert (tmp_path / "evaluated").exists() == (code == 0)
