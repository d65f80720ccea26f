"""Local, background and existing Dask clusters."""
