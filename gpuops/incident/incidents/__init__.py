"""One module for each kind of incident: from reports to one root cause."""
