"""How often to save: what a save costs against what a failure loses.

`failure_rate` weighs the failures on record against a published prior, `interval` finds the one
that loses least. Pure functions; sources are in their docstrings.
"""
