"""What runs inside each worker: the shim that notes steps and exceptions; stdlib only."""
