"""What the commands print, and the options they take."""
