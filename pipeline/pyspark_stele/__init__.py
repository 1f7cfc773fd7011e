"""Registers the data source `stele` with Spark, which looks for top-level modules named pyspark_* (Spark
4)."""

from stele_spark.source import SteleDataSource as DefaultSource

__all__ = ["DefaultSource"]
