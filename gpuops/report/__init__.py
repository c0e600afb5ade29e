"""What a run cost and why: statistics over the store, and how they are shown."""
