"""GPU and CPU operations, one folder each; the reference is the definition."""
