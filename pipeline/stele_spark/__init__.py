"""Spark reads and writes Stele tables: `spark.read.format("stele")`.

Runs in Spark's driver and executors; talks to the cluster through stele.client alone. Registered without a call by the
top-level module `pyspark_stele`, which Spark finds on the Python path.
"""
