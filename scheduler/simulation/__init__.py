"""The same Scheduler on simulated replicas."""
