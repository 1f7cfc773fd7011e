"""The masters: catalog, placement, liveness, background work. Built on the same replica code as every tablet.

`records` and `catalog` are replicated. `liveness` is the memory of one master. `leadership` exists only on
the leader. `service` answers requests; `server` is the process.
"""
