"""One module for each kind of incident: from what was reported to one root cause."""
