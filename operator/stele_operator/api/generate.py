"""Writes crds/*.yaml, their copies in the Helm chart, and docs/resources.md from the models. Run by `make
generate`.

`python -m stele_operator.api.generate [CRDS CHART_TEMPLATES]`. Invariant: the same models give the same
bytes. The chart's files differ from crds/ only in the annotation that keeps them when the release is removed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from stele_operator.api.definitions import definitions
from stele_operator.api.reference import reference

_ROOT = Path(__file__).resolve().parents[3]
DIRECTORY = _ROOT / "crds"
CHART_DIRECTORY = _ROOT / "charts" / "stele" / "templates" / "crds"
DOCUMENT = _ROOT / "docs" / "resources.md"
_HEAD = "Written by `python -m stele_operator.api.generate` from operator/stele_operator/api; do not edit."

Json = dict[str, Any]


class _Plain(yaml.SafeDumper):
    """Writes repeated parts in full, because YAML anchors are hard to read and some tools do not support
    them.
    """

    def ignore_aliases(self, data: object) -> bool:
        return True


def _dump(definition: Json) -> str:
    return yaml.dump(definition, Dumper=_Plain, sort_keys=False, width=110, allow_unicode=True)


def rendered() -> dict[str, str]:
    """The text of each file in crds/, by file name."""
    return {name: f"# {_HEAD}\n{_dump(definition)}" for name, definition in definitions().items()}


def chart_rendered() -> dict[str, str]:
    """The text of each file in the chart's templates/crds/, by file name.

    They are templates, because Helm updates templates with a release, but not a chart's crds/ folder. When
    the release is removed, the annotation keeps the definitions and all resources of their kinds.
    """
    made = {}
    for name, definition in definitions().items():
        metadata = {**definition["metadata"], "annotations": {"helm.sh/resource-policy": "keep"}}
        text = _dump({**definition, "metadata": metadata}).replace("{{", '{{ "{{" }}')
        made[name] = f"{{{{- /* {_HEAD} */ -}}}}\n{{{{- if .Values.crds.install }}}}\n{text}{{{{- end }}}}\n"
    return made


def main() -> None:
    """Write the files into the folders that the command line names, or into the repository if it names none."""
    crds, templates = map(Path, sys.argv[1:3]) if len(sys.argv) > 2 else (DIRECTORY, CHART_DIRECTORY)
    for directory, files in ((crds, rendered()), (templates, chart_rendered())):
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")
            print(directory / name)
    if len(sys.argv) <= 2:
        DOCUMENT.write_text(reference(), encoding="utf-8")
        print(DOCUMENT)


if __name__ == "__main__":
    main()
