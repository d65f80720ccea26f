"""The head: pure decisions and the simulator. Standard library, NumPy and PuLP only."""
