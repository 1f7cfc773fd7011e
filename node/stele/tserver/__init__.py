"""A node: volume, log, tablets, services, heartbeats, probes, made into one process. Masters are nodes with more services.

Imports consensus and rpc; nothing of Kubernetes.
"""
