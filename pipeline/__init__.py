"""The hands: Parquet and Dask carry out what the scheduler decides."""
