"""Snapshot files: how they are published, found again, verified and pruned."""
