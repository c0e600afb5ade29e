"""From failures to incidents: one root cause, its symptoms, its culprits, its runbook.

Pure functions of observations. Nothing here reads a clock, a file or the store, and nothing here
acts: the agent and the commands do. The exception is `override`, which runs the site's plug-in.
"""
