"""Batchers: which rows an engine runs in its next step."""
