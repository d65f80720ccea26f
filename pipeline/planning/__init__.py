"""From an index to a plan; forecast, dry run, profile, simulation."""
