"""Read-only queries, each returning plain records."""
