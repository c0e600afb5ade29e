"""Ingest events: each is stored once, and derived tables are updated in the same transaction.

`batch` inserts events and rebuilds derived tables, `envelope` reads payloads that other processes
wrote, `merge` combines rows that several writers report, `projections` has one function for each
kind of event.
"""
