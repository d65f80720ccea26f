"""The Dask task that drives one job: plan, events, commands, lease."""
