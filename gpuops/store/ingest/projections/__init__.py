"""Projections of events to derived tables: pure functions from one envelope to rows."""
