"""The kernel's lines of one attempt: those after the mark, and never an error."""

from gpuops.agent.journal.session import LINES_MAX, AttemptKernelLog


def write(root, *texts, first=1):
    path = root / "dev" / "kmsg"
    path.parent.mkdir(exist_ok=True)
    records = (f"3,{first + n},{1000 + n},-;{text}\n" for n, text in enumerate(texts))
    with path.open("a") as file:
        file.writelines(records)


def test_only_what_was_logged_after_the_mark_counts(tmp_path):
    write(tmp_path, "NVRM: Xid (PCI:0000:3b:00): 79, of last week")
    log = AttemptKernelLog(tmp_path)
    log.mark()
    write(tmp_path, "Out of memory: Killed process 4711 (python)", "eth0: up", first=2)

    assert log.since_mark() == ("Out of memory: Killed process 4711 (python)", "eth0: up")


def test_a_new_mark_forgets_the_attempt_before(tmp_path):
    write(tmp_path, "one")
    log = AttemptKernelLog(tmp_path)
    log.mark()
    write(tmp_path, "two", first=2)
    log.mark()

    assert log.since_mark() == ()


def test_a_log_that_may_not_be_read_is_empty(tmp_path):
    log = AttemptKernelLog(tmp_path / "nothing here")
    log.mark()

    assert log.since_mark() == ()


def test_without_a_mark_nothing_is_blamed_on_the_past(tmp_path):
    write(tmp_path, "one")

    assert AttemptKernelLog(tmp_path).since_mark() == ()


def test_a_flood_is_bounded(tmp_path):
    log = AttemptKernelLog(tmp_path)
    write(tmp_path, "first")
    log.mark()
    write(tmp_path, *(f"line {n}" for n in range(LINES_MAX + 10)), first=2)

    assert len(log.since_mark()) == LINES_MAX
    assert log.since_mark()[-1] == f"line {LINES_MAX + 9}"
