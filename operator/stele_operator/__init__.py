"""The controller of TabletClusters and TabletGroups. Top of the house: imports driver, client and messages of stele.

A pass is four calls: observe (authoritative lists), plan (pure), act (preconditions on everything), report (status,
events, metrics). Invariant: nothing in memory that the next pass, or the next process, could not find out again.
"""
