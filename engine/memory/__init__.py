"""The page pool and what it holds: keys and values, prefix pages, adapters."""
