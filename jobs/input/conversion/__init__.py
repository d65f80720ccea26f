"""Writes input that is not Parquet as Parquet: CSV, JSON Lines, Arrow, ORC, and tables of Python programs."""
