"""The two readers of one source: Python's, and the JVM's if its jar is built."""

from __future__ import annotations

from typing import Any

import pytest

from stele_spark.session import JAR

READERS = ("python", "jvm")


def need_jar() -> None:
    """Skip a test of the JVM reader where it is not built."""
    if not JAR.exists():
        pytest.skip("the JVM reader is not built: make jar")


def with_catalog(spark: Any, masters: str) -> Any:
    """The session, with the cluster's tables as catalog `st`. Skips the test where the JVM reader is not built."""
    need_jar()
    spark.conf.set("spark.sql.catalog.st", "dev.stele.spark.SteleCatalog")
    spark.conf.set("spark.sql.catalog.st.masters", masters)
    return spark
