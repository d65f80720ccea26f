"""Pure decisions: standard library, NumPy and PuLP only."""
