"""Tokenizers of models and adapters: text to tokens and back, as transformers does."""
