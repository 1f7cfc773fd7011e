"""The speed of Spark over Stele, beside Spark over its own Parquet: `python -m bench.spark`."""
