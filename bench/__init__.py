"""How fast, how big: `python -m bench` prints a table. Nothing here is a test; times are never asserted."""
