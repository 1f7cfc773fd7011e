"""The masters: catalog, placement, liveness, background work. Built on the same replica code as every tablet.

`records` and `catalog` are what is replicated; `liveness` is what one master alone remembers; `leadership` is what
only the leader has; `service` answers; `server` is the process.
"""
