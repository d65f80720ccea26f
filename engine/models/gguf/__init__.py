"""Converts GGUF files into Hugging Face model folders."""
