"""Measurements on one GPU: `python -m lorabatch.benchmarks.gpu`."""
