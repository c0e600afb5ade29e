"""Slurm from the node's side: the environment of its hooks, its commands, reasons of drains."""
