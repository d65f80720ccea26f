"""Estimates from what replicas report: lengths of answers, paces, costs of steps, time left."""
