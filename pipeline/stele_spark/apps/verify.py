"""`stele-verify`: runs `stele backup verify` with its work spread over Spark's executors."""

from __future__ import annotations

from stele.cli.verify import verify as command
from stele_spark.submitted import main as run


def main() -> None:
    """Entry point of `stele-verify`."""
    run("stele-verify", command, "stele backup verify")


if __name__ == "__main__":
    main()
