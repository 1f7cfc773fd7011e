"""A node: volume, log, tablets, services, heartbeats and probes in one process. A master is a node with an
extension.

Imports consensus and rpc. Knows nothing of Kubernetes.
"""
