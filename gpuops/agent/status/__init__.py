"""What others can see of an agent.

`state.AgentState` is an immutable snapshot. `server` serves it as ``/metrics``, ``/state`` and
``/healthz``, `published` writes it to the run directory and the control record, `console` keeps
output working when its reader is gone.
"""
