"""Lets Spark read and write Stele tables: `spark.read.format("stele")`.

Runs in Spark's driver and executors; uses the cluster only through stele.client. The top-level module
`pyspark_stele`, which Spark finds on the Python path, registers it.
"""
