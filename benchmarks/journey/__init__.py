"""Writes the page on the journey of a row from a real run of the demo, and draws its pictures."""
