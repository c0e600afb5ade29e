"""Which incident an account is about, so that accounts by several agents become one."""

import uuid

_NAMESPACE = uuid.UUID("6f0b0f8e-5d0c-5b1e-9a51-2d1c8f6a7e43")


def incident_id(run_id: str, attempt: int) -> str:
    """Return the id of the incident that ended *attempt*: the same from whichever node asks."""
    return str(uuid.uuid5(_NAMESPACE, f"{run_id}/{attempt}"))


def gate_incident_id(run_id: str, attempt: int, node: str) -> str:
    """Return the id of the incident that kept *node* out of *attempt*."""
    return str(uuid.uuid5(_NAMESPACE, f"{run_id}/{attempt}/{node}"))


def doubt_incident_id(run_id: str, node: str) -> str:
    """Return the id of the incident of *node* being doubted; there is one in a run."""
    return str(uuid.uuid5(_NAMESPACE, f"{run_id}/doubt {node}"))


def replicas_incident_id(run_id: str, ranks: str, epoch: int, step: int) -> str:
    """Return the id of the incident of *ranks* that differ from a state on."""
    return str(uuid.uuid5(_NAMESPACE, f"{run_id}/replicas {ranks}/{epoch}.{step}"))
