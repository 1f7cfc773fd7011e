"""The two readers of one source: Python's, and the JVM's if its jar is built."""

from __future__ import annotations

import pytest

from stele_spark.session import JAR

READERS = ("python", "jvm")


def need_jar() -> None:
    """Skip a test of the JVM reader where it is not built."""
    if not JAR.exists():
        pytest.skip("the JVM reader is not built: make jar")
