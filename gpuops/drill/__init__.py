"""Faults put into a running job on purpose, to see it recover."""
