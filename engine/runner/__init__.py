"""Runs a step: on the CPU at once, on a GPU one step ahead with CUDA graphs; sampling."""
