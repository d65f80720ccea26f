"""Parts that run on a Dask worker: the plugin, the shard task, the adapter cache, the peer service."""
