"""Makes a plan of an index; forecast, dry run, profile, simulation."""
