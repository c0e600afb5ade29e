"""The status that an agent publishes.

`state.AgentState` is an immutable snapshot. `server` serves it as ``/metrics``, ``/state`` and
``/healthz``, `published` builds it for the run directory and the heartbeats, `console` keeps output
working when its reader is gone.
"""
