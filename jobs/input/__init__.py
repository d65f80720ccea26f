"""The input dataset: Parquet files and the roles of their columns."""
