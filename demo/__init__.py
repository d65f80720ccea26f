"""The demo: shipped adapters and prompts, and how they were made."""
