"""One engine process kept alive, and the queue in front of it. No Dask."""
