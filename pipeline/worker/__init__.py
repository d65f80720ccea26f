"""What runs on a Dask worker: the plugin, the shard task, the adapter cache, the peer service."""
