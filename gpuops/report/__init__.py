"""What a run cost and why: statistics from the store, and their rendering."""
