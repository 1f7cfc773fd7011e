"""The driver of membership changes. Imports only model and rpc messages, never the servers' code.

`view` is what a driver sees, `policy` what it may do. `planner` decides and is pure; `executor` carries out.
"""
