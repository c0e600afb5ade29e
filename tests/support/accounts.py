"""What the account of a failure must say: its class, who is to blame, what was done, how soon."""

from support.faulty import culprits

# Generous: what a recovery really takes is a benchmark's matter.
BOUND_S = 90


def check_account(run, failure_class, *blamed, actions):
    """Return the newest incident of *failure_class*; fail unless it says all that it should.

    *blamed* are pairs of kind and id that must be among its culprits. From the last step before it
    to the first one after it, as far as there was one, at most `BOUND_S` may have passed.
    """
    incident = run.incident(failure_class)
    assert culprits(incident) >= set(blamed), incident
    assert incident["actions"] == actions, incident
    passed_s = {k: s for k, s in incident["lost_seconds_by_phase"].items() if k != "redo"}
    assert sum(passed_s.values()) < BOUND_S, passed_s
    return incident
