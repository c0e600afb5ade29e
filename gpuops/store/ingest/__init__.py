"""Events into the store: each is kept once, derived tables are updated in the same transaction.

`batch` inserts, `envelope` reads payloads that other processes wrote, `merge` combines rows that
several writers tell about, `projections` has one function for each kind of event, `rebuild` makes
the derived tables anew.
"""
