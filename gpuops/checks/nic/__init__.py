"""Checks of network adapters and of PCI Express."""
