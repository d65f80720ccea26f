"""Reads a job's status, logs and notes from its output alone, without a cluster."""
