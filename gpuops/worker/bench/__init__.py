"""What saving and restoring costs on this machine, beside torch's own ways and physical limits."""
