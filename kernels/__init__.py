"""Operators on tensors, one folder each: the operator, its types, its reference, and its CPU and Triton back ends."""
