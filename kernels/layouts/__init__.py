"""Layouts that several operators read: pages of keys and values, the table of resident adapters, a step's segments."""
