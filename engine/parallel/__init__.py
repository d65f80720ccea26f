"""Tensor-parallel groups: several processes that compute the steps of one engine together."""
