"""Tensors in, tensors out. One folder per operator: the operator, its reference, its CPU and Triton forms."""
