"""Measured against peers; every result names machine, versions, date and commit."""
