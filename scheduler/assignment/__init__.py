"""Assignment of work to replicas: shards that are dispatched, and rows that move."""
