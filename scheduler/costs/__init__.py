"""The cost model: seconds of a step, for a machine, and fitted to measurements."""
