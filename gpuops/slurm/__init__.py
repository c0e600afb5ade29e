"""Slurm from the node's side: its environment, its host lists, its commands."""
