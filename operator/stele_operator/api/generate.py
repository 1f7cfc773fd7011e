"""Writes crds/*.yaml from the models: `python -m stele_operator.api.generate [DIRECTORY]`. Run by `make generate`.

Invariant: the same models give the same bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from stele_operator.api.definitions import definitions

DIRECTORY = Path(__file__).resolve().parents[3] / "crds"


class _Plain(yaml.SafeDumper):
    """Writes repeated parts out: YAML anchors are hard to read, and some tools do not."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def rendered() -> dict[str, str]:
    """Text of each file in crds/, by name."""
    head = "# Written by `python -m stele_operator.api.generate` from operator/stele_operator/api; do not edit.\n"
    return {
        name: head + yaml.dump(definition, Dumper=_Plain, sort_keys=False, width=110, allow_unicode=True)
        for name, definition in definitions().items()
    }


def main() -> None:
    """Write the files."""
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else DIRECTORY
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in rendered().items():
        (directory / name).write_text(text, encoding="utf-8")
        print(directory / name)


if __name__ == "__main__":
    main()
