"""The controller of TabletClusters and TabletGroups. Imports stele's driver, client and messages; nothing
imports it.

A pass is four calls: observe (authoritative lists), plan (pure), act (preconditions on everything), report
(status, events, metrics). Invariant: whatever is in memory, the next pass or the next process can find out
again.
"""
