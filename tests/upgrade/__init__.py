"""Two releases in one cluster."""
