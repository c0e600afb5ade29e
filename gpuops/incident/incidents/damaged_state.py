"""The incident of a saved state that is damaged on disk."""

from gpuops.incident.lifecycle import about_damage
from gpuops.model import (
    Confidence,
    Entity,
    EntityKind,
    Evidence,
    FailureClass,
    Incident,
    IncidentState,
    Role,
    Side,
    run_incident_id,
)
from gpuops.scrub import scrub


def incident_from_damage(
    why: str, *, step: int, epoch: int, run_id: str, node: str, at_us: int
) -> Incident:
    """Return the incident: *why*, found by *node* at *at_us*, names the file and the damage.

    Storage returned other bytes than were written, and were read back once: no failure of gpuops.
    Which disk, server or node did it is not known. The incident is closed, as damage is: no restart
    loads the state.
    """
    text = scrub(f"the checkpoint of step {step} is damaged on disk: {why}")
    about = about_damage(epoch, step)
    return Incident(
        id=run_incident_id(run_id, about),
        about=about,
        failure_class=FailureClass.STORAGE_IO_ERROR,
        side=Side.AMBIGUOUS,
        confidence=Confidence.CONFIRMED,
        state=IncidentState.CLOSED,
        title=text,
        first_us=at_us,
        detected_us=at_us,
        run_id=run_id,
        culprit_how="its bytes are not those that were saved",
        evidence=(Evidence(role=Role.ROOT, text=text, entity=Entity(EntityKind.NODE, node)),),
        authority=2,
        resolved_us=at_us,
        resolution="the state is marked as damaged, and no restart loads it",
    )
