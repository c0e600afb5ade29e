"""Alembic's migrations: one line of numbered revisions. Expand first, contract a release later."""
