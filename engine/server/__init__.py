"""The engine as a process of its own: frames over pipes."""
