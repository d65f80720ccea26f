"""Decisions before a job runs: order and shards of its rows, their placement, a lower bound."""
