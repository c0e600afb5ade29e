"""Rendering of reports: text of 100 columns, and JSON bodies whose keys are a contract."""
