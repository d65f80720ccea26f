"""Runs one base model with many adapters on one device. Light modules (config, request, peft audit) load no torch."""
