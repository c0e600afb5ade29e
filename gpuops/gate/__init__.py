"""The gate: a node is checked, what was found is remembered, and a hook of Slurm acts on it."""
