"""Fault injection into a running job, to test that it recovers."""
