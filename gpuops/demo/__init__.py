"""The main job on real input: train, kill a rank, recover, report."""
