"""Views ``v_*`` for people and Grafana: names in place of ids, timestamps in place of microseconds.

They are code, not data: `gpuops.store.migrate` makes them anew at each upgrade. Beside each time
stands its age in days (``days_ago``), so that one query works on both databases. ``by_root``: root
wrote it; else a user did, who can blame any node.
"""

import re

from sqlalchemy import Connection, text

# {time:x}: the microseconds x as a timestamp; {days:x}: the days from x until now.
_SQLITE = {
    "time": "strftime('%Y-%m-%d %H:%M:%S', {0} / 1000000, 'unixepoch')",
    "days": "((julianday('now') - 2440587.5) - {0} / 86400e6)",
}
_POSTGRES = {
    "time": "to_timestamp({0} / 1e6)",
    "days": "CAST((extract(epoch FROM now()) - {0} / 1e6) / 86400 AS double precision)",
}

_VIEWS = {
    # The last run is one of those recorded in the last day: each is, once a day, also if unchanged.
    # A user's own run is no check of the node.
    "v_nodes": """
        SELECT n.id AS node_id, n.hostname AS node, c.name AS cluster,
            {time:n.first_seen_us} AS first_seen, {days:n.first_seen_us} AS first_seen_days_ago,
            CASE WHEN r.last_us > n.last_seen_us THEN {days:r.last_us}
                ELSE {days:n.last_seen_us} END AS last_seen_days_ago,
            r.status, r.suite, {time:r.last_us} AS last_check,
            {days:r.last_us} AS last_check_days_ago
        FROM nodes n JOIN clusters c ON c.id = n.cluster_id
        LEFT JOIN check_runs r ON r.id = (
            SELECT x.id FROM check_runs x
            WHERE x.node_id = n.id AND x.origin_uid = 0 AND x.start_us >= (
                SELECT max(y.start_us) FROM check_runs y
                WHERE y.node_id = n.id AND y.origin_uid = 0) - 86400000000
            ORDER BY x.last_us DESC, x.id DESC LIMIT 1)
    """,
    "v_check_runs": """
        SELECT n.hostname AS node, r.suite, r.trigger, r.status, r.runs, r.job_id, r.profile,
            r.origin_uid, {time:r.start_us} AS since, {time:r.last_us} AS until,
            {days:r.last_us} AS days_ago, r.id AS check_run_id
        FROM check_runs r JOIN nodes n ON n.id = r.node_id
    """,
    "v_findings": """
        SELECT n.hostname AS node, r.suite, f.check_name, f.entity_kind, f.entity_id, f.status,
            f.failure_class, f.value, f.unit, f.message, r.runs, {time:r.start_us} AS since,
            {time:r.last_us} AS until, {days:r.last_us} AS days_ago, r.id AS check_run_id,
            c.name AS cluster, r.origin_uid = 0 AS by_root
        FROM check_results f JOIN check_runs r ON r.id = f.check_run_id
        JOIN nodes n ON n.id = r.node_id JOIN clusters c ON c.id = n.cluster_id
    """,
    "v_incidents": """
        SELECT i.id AS incident_id, c.name AS cluster, i.failure_class, i.category, i.side,
            i.confidence, i.state, i.title, i.run_id, i.attempt, i.lost_us / 3600e6 AS lost_hours,
            {time:i.first_us} AS first_seen, {time:i.detected_us} AS detected,
            {time:i.resolved_us} AS resolved, {days:i.first_us} AS days_ago,
            substr(i.account_key, 1, 5) = 'root/' AS by_root
        FROM incidents i JOIN clusters c ON c.id = i.cluster_id
    """,
    # A culprit stands if the account of the incident that counts names it.
    "v_culprits": """
        SELECT i.id AS incident_id, i.failure_class, i.side, i.confidence, i.state, i.run_id,
            p.entity_kind, p.entity_id, n.hostname AS node, p.account_key = i.account_key AS stands,
            {time:i.first_us} AS first_seen, {days:i.first_us} AS days_ago,
            c.name AS cluster, substr(p.account_key, 1, 5) = 'root/' AS by_root
        FROM incident_culprits p JOIN incidents i ON i.id = p.incident_id
        JOIN clusters c ON c.id = i.cluster_id
        LEFT JOIN nodes n ON n.id = p.node_id
    """,
    # What a run of a suite that failed measured is here, too: ``run_status``.
    "v_measurements": """
        SELECT c.name AS cluster, n.hostname AS node, m.suite, m.test, m.parameters, m.part_kind,
            m.part_id, m.value, m.unit, m.spread_percent, m.repeats, m.higher_is_better, m.status,
            r.status AS run_status, m.shape, m.software, {time:m.t_us} AS measured,
            {days:m.t_us} AS days_ago, m.check_run_id, m.origin_uid = 0 AS by_root
        FROM measurements m JOIN nodes n ON n.id = m.node_id JOIN clusters c ON c.id = n.cluster_id
        LEFT JOIN check_runs r ON r.id = m.check_run_id
    """,
    "v_pair_tests": """
        SELECT c.name AS cluster, p.sweep_id, p.round, p.node_a, p.node_b, p.rail, p.outcome,
            p.value, p.unit, p.parameters, {time:p.t_us} AS tested, {days:p.t_us} AS days_ago,
            p.origin_uid = 0 AS by_root
        FROM pair_tests p JOIN clusters c ON c.id = p.cluster_id
    """,
    "v_parts": """
        SELECT n.hostname AS node, p.kind, p.component_id AS part,
            {time:p.first_seen_us} AS first_seen, {time:p.last_seen_us} AS last_seen
        FROM components p JOIN nodes n ON n.id = p.node_id
    """,
    # A drain lasts until the node is resumed or drained anew, else until now. All are root's.
    "v_drains": """
        SELECT c.name AS cluster, n.hostname AS node, s.actor, s.reason, s.job_id,
            {time:s.t_us} AS drained, {time:s.next_us} AS until, {days:s.t_us} AS days_ago,
            24 * ({days:s.t_us} - coalesce({days:s.next_us}, 0)) AS hours
        FROM (
            SELECT node_id, actor, reason, job_id, state, t_us,
                lead(t_us) OVER (PARTITION BY node_id ORDER BY t_us, id) AS next_us
            FROM node_states WHERE state IN ('drained', 'resumed')
        ) s JOIN nodes n ON n.id = s.node_id JOIN clusters c ON c.id = n.cluster_id
        WHERE s.state = 'drained'
    """,
}


def create_views(connection: Connection) -> None:
    """Make the views; they must not exist."""
    words = _SQLITE if connection.dialect.name == "sqlite" else _POSTGRES
    for name, query in _VIEWS.items():
        body = re.sub(r"\{(\w+):([\w.]+)\}", lambda m: words[m[1]].format(m[2]), query)
        # Not by text(), to which a colon is a parameter.
        connection.exec_driver_sql(f"CREATE VIEW {name} AS {body}")


def drop_views(connection: Connection) -> None:
    """Drop the views that exist, as tables can only be altered without them."""
    for name in _VIEWS:
        connection.execute(text(f"DROP VIEW IF EXISTS {name}"))
