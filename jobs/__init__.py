"""What a job is on paper: specification, validation, record, store, status. No Dask, no torch."""
