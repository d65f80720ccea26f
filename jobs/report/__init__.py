"""The story of a job as one HTML file: `timeline` reads events, `drawing` places shapes, `page` writes."""
