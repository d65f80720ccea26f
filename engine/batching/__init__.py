"""Chooses which rows run in the next step: queue, admission, prefix sharing."""
