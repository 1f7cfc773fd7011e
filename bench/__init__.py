"""Measures speed and size: `python -m bench` prints a table. Nothing here is a test; no time is asserted."""
