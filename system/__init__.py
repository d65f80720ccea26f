"""Holds what every room may use: untrusted data, confined processes, local files, the codec of messages."""
