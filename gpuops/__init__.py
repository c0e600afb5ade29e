"""Cluster reliability toolkit for people who train on GPU clusters.

Importing this package imports nothing else: a Slurm prolog pays for what it uses only.
"""

__version__ = "0.1.0"
