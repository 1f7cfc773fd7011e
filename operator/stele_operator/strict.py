"""Strict reading of YAML that people write without an API server in between. Called by preview and answers.

Invariant: nothing is guessed. A key that stands twice, an unknown field and a value of another type are faults. A text is no
number, and a fraction no count.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, TypeVar, get_args

import pydantic
import yaml
from yaml.composer import ComposerError

from stele.model.nearest import did_you_mean
from stele.model.yamls import OnceLoader

Spec = TypeVar("Spec", bound=pydantic.BaseModel)


class BadText(Exception):
    """A text that is no YAML or JSON; one line that says why."""


class _Loader(OnceLoader):
    """Reads dates as text, as Kubernetes does."""


class _OfStrangers(_Loader):
    """Refuses aliases, too: a few lines of them can expand to more values than fit into memory. Somebody who may
    annotate one TabletCluster must not be able to end the operator of all."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise ComposerError(None, None, "it has an alias; write the value itself")
        return super().compose_node(parent, index)


def _text(loader: _Loader, node: yaml.ScalarNode) -> str:
    return str(loader.construct_scalar(node))


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _text)


def documents(text: str, *, of_strangers: bool = False) -> list[Any]:
    """The documents of a YAML or JSON text, without empty ones. `of_strangers`: this process also serves others, so the
    text may have no aliases. Raises BadText."""
    loader = _OfStrangers if of_strangers else _Loader
    try:
        return [each for each in yaml.load_all(text, loader) if each is not None]
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        raise BadText(" ".join(str(exc).split())) from exc


def spec_of(model: type[Spec], raw: Any) -> tuple[Spec | None, tuple[str, ...]]:
    """(spec, faults) of what somebody wrote; the spec is None if there is a fault."""
    try:
        text = json.dumps({} if raw is None else raw)
    except (TypeError, ValueError) as exc:  # a key that is no text, a binary value
        return None, (f"spec: {exc}",)
    try:
        return model.model_validate_json(text, strict=True), ()
    except pydantic.ValidationError as exc:
        return None, tuple(_told(model, each["loc"], each["type"], each["msg"]) for each in exc.errors())


def _told(model: type[pydantic.BaseModel], place: tuple[str | int, ...], kind: str, message: str) -> str:
    where = f"spec.{'.'.join(map(str, place))}" if place else "spec"
    if kind != "extra_forbidden":
        return f"{where}: {message}"
    return f"{where}: there is no such field{did_you_mean(str(place[-1]), _fields(model, place[:-1]))}"


def _fields(model: type[pydantic.BaseModel], place: Iterable[str | int]) -> list[str]:
    """The names of the fields at a place; empty if it is no place of a model."""
    found: type[pydantic.BaseModel] | None = model
    for step in place:
        if isinstance(step, int) or found is None:
            continue
        field = found.model_fields.get(step)
        found = None if field is None else _model_in(field.annotation)
    return [] if found is None else list(found.model_fields)


def _model_in(annotation: Any) -> type[pydantic.BaseModel] | None:
    """The model that a field's type has within: that of a list's elements, or of an optional value."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)
