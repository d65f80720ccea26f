"""The HTML report of a job."""
