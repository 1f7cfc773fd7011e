"""`python -m stele_spark.executor`: an executor of Spark, in a pod that Spark's driver made. The operator's
template of these pods names it.

Environment variables that Spark sets say which executor it is. Invariant: this process becomes Java, so that
the pod ends when Java ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

_OPTION = "SPARK_JAVA_OPT_"
_WORDS = {
    "--driver-url": "SPARK_DRIVER_URL",
    "--executor-id": "SPARK_EXECUTOR_ID",
    "--cores": "SPARK_EXECUTOR_CORES",
    "--app-id": "SPARK_APPLICATION_ID",
    "--hostname": "SPARK_EXECUTOR_POD_IP",
    "--resourceProfileId": "SPARK_RESOURCE_PROFILE_ID",
    "--podName": "SPARK_EXECUTOR_POD_NAME",
}
_BACKEND = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"


def command(java_home: Path, jars: Path, given: Mapping[str, str]) -> list[str]:
    """The command to run. `given`: the environment variables that Spark has set.

    Raises:
        ValueError: some of these variables are missing.
    """
    needed = ["SPARK_EXECUTOR_MEMORY", *_WORDS.values()]
    if missing := [name for name in needed if not given.get(name)]:
        raise ValueError(
            f"not set in the environment: {', '.join(missing)}; run this only in a pod that Spark starts"
        )
    numbers = sorted(int(name.removeprefix(_OPTION)) for name in given if name.startswith(_OPTION))
    memory = given["SPARK_EXECUTOR_MEMORY"]
    return [
        str(java_home / "bin" / "java"),
        *(given[f"{_OPTION}{number}"] for number in numbers),
        *(f"-Xms{memory}", f"-Xmx{memory}", "-cp", f"{jars}/*", _BACKEND),
        *(word for option, name in _WORDS.items() for word in (option, given[name])),
    ]


def main() -> None:
    """Become the executor. Exits with 2 if Spark did not start this process."""
    import pyspark

    from stele_spark.session import find_java_home

    home = Path(pyspark.__file__).parent
    try:
        run = command(find_java_home(), home / "jars", os.environ)
    except (ValueError, RuntimeError) as exc:
        sys.stderr.write(f"stele_spark.executor: {exc}\n")
        sys.exit(2)
    own = {"SPARK_HOME": str(home), "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(sys.path)}
    os.execve(run[0], run, {**os.environ, **own})


if __name__ == "__main__":
    main()
