"""A request while it runs: deltas in, updates of choices out."""
