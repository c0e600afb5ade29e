"""What an event adds to the derived tables: pure functions from one envelope to rows."""
