"""Tokenizer, chat template, stop conditions."""
