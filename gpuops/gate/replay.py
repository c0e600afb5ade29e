"""Facts of a node: recorded there, judged anywhere. No judging looks at the machine it runs on."""

from gpuops.checks.collect import collect
from gpuops.checks.recording import Recording
from gpuops.checks.runner import CheckRun, Tell, judge
from gpuops.gate.session import Plan, terms_of, with_notes
from gpuops.gate.state import GPUS_LOOK
from gpuops.gate.state_file import Remembered, recall
from gpuops.host.abandoned import abandoned
from gpuops.host.clock import Clock, FakeClock
from gpuops.host.node_state import Moment


def record_facts(plan: Plan, clock: Clock) -> tuple[Recording, str | None]:
    """Return what the looks of *plan* give, and what is wrong with the node's state file.

    The caller must have a single thread.
    """
    request, left = plan.request, abandoned()
    known = recall(request.state_dir, request.root, request.uid, left)
    moment = Moment(boot_id=known.boot_id, since_boot_s=known.since_boot_s, t_us=clock.now_us())
    chooser = plan.choice(known.state.profile).chooser()
    recording = Recording(
        node=request.node,
        moment=moment,
        looks={item.look: item for item in collect(plan.suite, plan.machine, chooser, left)},
        state=known.state,
        profile=request.profile,
        gpus_expected=request.gpus_expected,
    )
    return recording, known.note


def judge_recording(
    plan: Plan, recording: Recording, tell: Tell = lambda _findings: None
) -> CheckRun:
    """Return what the suite of *plan*, for the recorded node, makes of *recording*.

    The run is dated when the recording was made.

    Raises:
        UsageError: Facts have another form than this gpuops knows.
    """
    moment, state = recording.moment, recording.state
    known = Remembered(state=state, boot_id=moment.boot_id, since_boot_s=moment.since_boot_s)
    choice = plan.choice(state.profile)
    terms = terms_of(plan, choice, known, moment, tell)
    looks = list(recording.looked(plan.suite, GPUS_LOOK))
    ran = judge(plan.suite, looks, terms, FakeClock(moment.t_us))
    return with_notes(ran, choice, known, terms)
