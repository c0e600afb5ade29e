"""Checks of file systems and drives."""
