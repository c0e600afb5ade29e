"""Facts of a node: recorded there, judged anywhere. No judging looks at the machine it runs on."""

from gpuops.checks.core.probes import collect
from gpuops.checks.core.recording import Recording
from gpuops.checks.core.runner import CheckRun, OnFinding, judge
from gpuops.gate.node_state import GPUS_LOOK, StoredNodeState, load_state
from gpuops.gate.session import CheckPlan, terms_of, with_notes
from gpuops.host.clock import Clock, FakeClock
from gpuops.host.node_state import BootMoment
from gpuops.host.process.abandoned import abandoned


def record_facts(plan: CheckPlan, clock: Clock) -> tuple[Recording, str | None]:
    """Return what the looks of *plan* give, and what is wrong with the node's state file.

    The caller must have a single thread.
    """
    request, left = plan.request, abandoned()
    known = load_state(request.state_dir, request.root, request.uid, left)
    moment = BootMoment(boot_id=known.boot_id, since_boot_s=known.since_boot_s, t_us=clock.now_us())
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
    plan: CheckPlan, recording: Recording, tell: OnFinding = lambda _findings: None
) -> CheckRun:
    """Return what the suite of *plan*, for the recorded node, makes of *recording*.

    The run is dated when the recording was made.

    Raises:
        UsageError: Facts have another form than this gpuops knows.
    """
    moment, state = recording.moment, recording.state
    known = StoredNodeState(state=state, boot_id=moment.boot_id, since_boot_s=moment.since_boot_s)
    choice = plan.choice(state.profile)
    terms = terms_of(plan, choice, known, moment, tell)
    looks = list(recording.looked(plan.suite, GPUS_LOOK))
    ran = judge(plan.suite, looks, terms, FakeClock(moment.t_us))
    return with_notes(ran, choice, known, terms)
