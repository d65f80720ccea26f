"""The options of a job: how their values are read, which problems they have, and their types for programs."""
