"""Stele: replicated tables of tablets, each a Raft group. Imports nothing, so that any part is imported alone."""

__version__ = "0.1.0"
"""Of all that this distribution holds. pyproject.toml takes it from here."""
