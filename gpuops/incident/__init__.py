"""From failures to incidents: one root cause, its symptoms, its culprits, its runbook.

Pure functions over what others have seen. Nothing here reads a clock, a file of the machine or
the store, and nothing here acts: the agent and the commands do.
"""
