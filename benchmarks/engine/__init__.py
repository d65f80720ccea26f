"""Measures one engine: beside peers (`bench.py`), in number formats, with many adapters and with shared prompts."""
