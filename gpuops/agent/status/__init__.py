"""What others can see of an agent.

`state.AgentState` is an immutable snapshot. `metrics` renders it for Prometheus (names and labels
are a contract), `server` serves ``/metrics``, ``/state`` and ``/healthz``, `published` writes it to
the run directory and the control record, `console` keeps output going when its reader is gone.
"""
