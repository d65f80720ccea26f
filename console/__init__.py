"""Output of the commands, and the options that they take."""
