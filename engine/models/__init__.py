"""The decoder, its layers, loading and merging of weights."""
