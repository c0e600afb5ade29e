"""The spool: events on local disk until the store has them.

`write` appends (an event is on disk before `append` returns), `segments` names and bounds files,
`read` treats every line as hostile, `send` delivers each event at least once and the store keeps it
once. `record` adds the run's own copy, which is never deleted, and lets a thread record without
waiting for the file system; `format` encodes and decodes a line. `users` has the spools of users,
`forward` sends them as root, `replay` sends refused lines again, and `folders` opens what another
user may replace at any moment.
"""
