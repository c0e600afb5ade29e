"""Checks of what connects GPUs in a node: NVLink and NVSwitch."""
