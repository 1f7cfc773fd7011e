"""A YAML loader that refuses keys that stand twice. The base of all strict reading of what people write."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml
from yaml.constructor import ConstructorError


class OnceLoader(yaml.SafeLoader):
    """Raises ConstructorError for a repeated key: YAML would silently drop the first of the two."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in seen:
                line = key.start_mark.line + 1
                raise ConstructorError(None, None, f"line {line}: {key.value!r} appears twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep)
