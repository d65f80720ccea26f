"""Files at any fsspec URL, local copies of folders, and redaction of credentials in messages."""
