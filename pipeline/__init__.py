"""Runs a job on a Dask cluster."""
