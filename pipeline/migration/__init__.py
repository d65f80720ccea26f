"""Running rows that move between workers."""
