"""Batch files of OpenAI's API: requests in, as a job's Parquet input; responses out, from a job's output."""
