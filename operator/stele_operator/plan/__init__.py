"""What to do next, and why: from an observation to actions and findings. Called by reconcile and by the tests.

Pure: no kopf, no Kubernetes client, no clock, no I/O. Invariant: the same observation gives the same plan; every
action is safe to repeat, and a plan made after any prefix of it was carried out leads to the same end.
"""

from stele_operator.plan.actions import Action
from stele_operator.plan.cluster_plan import Plan, make_plan
from stele_operator.plan.observation import Observation

__all__ = ["Action", "Observation", "Plan", "make_plan"]
