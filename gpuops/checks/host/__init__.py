"""Checks of the machine around the GPUs: processors, memory, clock, kernel, services."""
