"""The demo: a cluster, real data, a machine lost for good, healed and compared. `make demo` runs it."""
