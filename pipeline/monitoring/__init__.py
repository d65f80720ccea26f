"""Job state, dashboard page, logs, autoscaling."""
