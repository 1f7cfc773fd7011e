"""Turns an observation into a plan: actions and findings, each with its reason. Called by reconcile and by
the tests.

Pure: no kopf, no Kubernetes client, no clock, no I/O. Invariants: the same observation gives the same plan.
Every action is safe to repeat. If a pass stops after some of its actions, the next plan leads to the same
end.
"""

from stele_operator.plan.actions import Action
from stele_operator.plan.cluster_plan import Plan, make_plan
from stele_operator.plan.observation import Observation

__all__ = ["Action", "Observation", "Plan", "make_plan"]
