"""The driver of membership changes. Imports model and rpc messages only; never a server's insides.

`view` is what a driver sees, `policy` what it may do, `planner` decides (pure), `executor` carries out.
"""
