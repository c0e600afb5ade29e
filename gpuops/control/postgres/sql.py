"""Statements of a control store in Postgres, each a transaction of its own and safe to repeat.

Key ``''`` holds the instance of a run: no key of ours is empty.
"""

from typing import LiteralString

Statement = LiteralString

TABLE_EXISTS: Statement = "SELECT to_regclass('gpuops_board') IS NOT NULL"
# Agents of a new cluster all come at once; IF NOT EXISTS alone fails where two make it.
LOCK: Statement = "SELECT pg_advisory_xact_lock(7165062930245)"
# Room on each page keeps a heartbeat's new row next to its old one, off the index.
CREATE: Statement = """
CREATE TABLE IF NOT EXISTS gpuops_board (
    run_key text NOT NULL,
    key text COLLATE "C" NOT NULL,
    value bytea NOT NULL,
    version bigint NOT NULL,
    arrival bigint GENERATED ALWAYS AS IDENTITY,
    changed timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (run_key, key)
) WITH (fillfactor = 50)
"""
# Not as start-up options: poolers refuse those. A lost commit would undo an agreement.
SETTINGS: Statement = """
SELECT set_config('statement_timeout', %(timeout)s, false),
       set_config('lock_timeout', %(timeout)s, false),
       set_config('synchronous_commit', CASE current_setting('synchronous_commit')
           WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END, false)
"""
GET: Statement = """
SELECT substr(value, 1, %(cut)s), version, arrival FROM gpuops_board
WHERE run_key = %(run)s AND key = %(key)s
"""
LIST: Statement = """
SELECT key, substr(value, 1, %(cut)s), version, arrival FROM gpuops_board
WHERE run_key = %(run)s AND key <> '' AND key >= %(prefix)s AND starts_with(key, %(prefix)s)
ORDER BY arrival
"""
INSERT: Statement = """
INSERT INTO gpuops_board (run_key, key, value, version) VALUES (%(run)s, %(key)s, %(value)s, 1)
ON CONFLICT (run_key, key) DO NOTHING RETURNING arrival
"""
UPDATE: Statement = """
UPDATE gpuops_board SET value = %(value)s, version = version + 1, changed = now()
WHERE run_key = %(run)s AND key = %(key)s AND version = %(version)s - 1 RETURNING arrival
"""
PUT: Statement = """
INSERT INTO gpuops_board (run_key, key, value, version) VALUES (%(run)s, %(key)s, %(value)s, 1)
ON CONFLICT (run_key, key) DO UPDATE
SET value = excluded.value, version = gpuops_board.version + 1, changed = now()
"""
READ_WATCHED: Statement = """
SELECT extract(epoch FROM clock_timestamp())::float8, substr(value, 1, %(cut)s), version, arrival
FROM (SELECT 1) AS one LEFT JOIN gpuops_board
ON run_key = %(run)s AND key = %(watch)s AND version > %(seen)s
"""
# A heartbeat that a crash of the database undoes is followed by the next one.
HEARTBEAT: Statement = f"""
WITH beat AS ({PUT}),
     quick AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true) AS done)
SELECT look.* FROM quick, LATERAL ({READ_WATCHED}) AS look WHERE quick.done IS NOT NULL
"""  # noqa: S608 put together from the two above
DELETE: Statement = (
    "DELETE FROM gpuops_board WHERE run_key = %(run)s AND starts_with(key, %(prefix)s)"
)
DELETE_OLD: Statement = """
DELETE FROM gpuops_board WHERE run_key IN (
    SELECT run_key FROM gpuops_board GROUP BY run_key
    HAVING max(changed) < now() - make_interval(days => %(days)s)
)
"""
