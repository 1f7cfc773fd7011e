"""Reads YAML that people write and that no API server has checked. Called by preview and answers.

Invariant: nothing is guessed. A key that stands twice, an unknown field and a value of another type are
faults. A text does not count as a number, nor a fraction as a whole number.
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
    """The text is neither YAML nor JSON. The message is one line that says why."""


class _Loader(OnceLoader):
    """Reads dates as text, as Kubernetes does."""


class _OfStrangers(_Loader):
    """Refuses aliases, too, because a few lines of them can expand to more values than fit into memory.
    Somebody who may annotate one TabletCluster must not be able to end the operator of all clusters.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise ComposerError(None, None, "it has an alias; write the value itself")
        return super().compose_node(parent, index)


def _text(loader: _Loader, node: yaml.ScalarNode) -> str:
    return str(loader.construct_scalar(node))


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _text)


def documents(text: str, *, of_strangers: bool = False) -> list[Any]:
    """The documents of a YAML or JSON text, without empty ones. `of_strangers`: the text may have no aliases,
    because this process also serves others.

    Raises:
        BadText: the text cannot be read.
    """
    loader = _OfStrangers if of_strangers else _Loader
    try:
        return [each for each in yaml.load_all(text, loader) if each is not None]
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        raise BadText(" ".join(str(exc).split())) from exc


def spec_of(model: type[Spec], raw: Any) -> tuple[Spec | None, tuple[str, ...]]:
    """The spec that somebody wrote, and its faults. The spec is None if there is a fault."""
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
    """The names of the fields at a place of a model; empty if the place is not in a model."""
    found: type[pydantic.BaseModel] | None = model
    for step in place:
        if isinstance(step, int) or found is None:
            continue
        field = found.model_fields.get(step)
        found = None if field is None else _model_in(field.annotation)
    return [] if found is None else list(found.model_fields)


def _model_in(annotation: Any) -> type[pydantic.BaseModel] | None:
    """The model inside a field's type, such as that of a list's elements or of an optional value; None if
    there is none.
    """
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)
