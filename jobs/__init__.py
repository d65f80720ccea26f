"""A job on paper: its specification, validation, record, store and status. Imports no Dask and no torch."""
