"""Repeat the papers' comparisons, and the offline ones, in the simulator: `python -m
lorabatch.benchmarks.simulation`.
"""
