"""Simulation of jobs: the real Scheduler and the real batching on simulated replicas."""
