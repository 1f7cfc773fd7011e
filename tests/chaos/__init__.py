"""Real processes of a whole cluster, killed with -9 at moments that a seed draws. `make chaos`."""
