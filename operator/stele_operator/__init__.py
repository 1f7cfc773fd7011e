"""The controller of TabletClusters and TabletGroups. Imports stele's driver, client and messages; nothing
imports it.

A pass is four calls: observe (authoritative lists), plan (pure), act (preconditions on everything), report
(status, events, metrics). Invariant: everything in memory can be found out again by the next pass or the next
process.
"""
