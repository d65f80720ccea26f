"""Parquet in, prepared rows, part files out."""
