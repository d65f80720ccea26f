"""Where a job stands and what it went through, from its output alone."""
