"""The paper: what a job is, whether it is valid, and where its records lie. No Dask, no torch."""
