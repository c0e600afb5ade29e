"""The incident store: events in SQLite or Postgres, and tables derived from them.

``events`` is append-only and the source of truth; all history tables can be rebuilt from it. A
writer never waits for the store: it appends to a spool on local disk (`spool`), which a flusher
sends.

* `spool`: the files, their format, writing, reading, sending.
* `ingest`: each event once; `ingest.projections`: what an event adds to the derived tables.
* `schema`, `columns`, `migrations`, `migrate`: tables and their upgrades.
* `engine`, `backends`: store URLs and connections; `history`: a store opened for reading.
* `queries`: what commands read; `permits`, `coordination`: permission to drain a node.
* `events`: makes new events.
"""
