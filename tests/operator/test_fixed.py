"""Fields that cannot change are known from the models' own rules, and each form of such a rule is known."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from stele_operator.api.cluster import TabletClusterSpec
from stele_operator.api.fixed import fixed_faults, holds, transition_rules
from stele_operator.api.group import TabletGroupSpec
from stele_operator.api.structural import structural_schema
from tests.operator.cluster import EXAMPLES
from tests.operator.crd_bodies import changed
from tests.operator.test_crd_rules import FIXED

Json = dict[str, Any]
MODELS: dict[str, type[TabletClusterSpec | TabletGroupSpec]] = {
    "cluster": TabletClusterSpec,
    "flights": TabletGroupSpec,
}


def example(name: str) -> Json:
    """One of the examples."""
    found: Json = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    return found


@pytest.mark.parametrize(("name", "path", "value", "words"), FIXED)
def test_what_the_api_server_refuses_is_foretold(name: str, path: str, value: Any, words: str) -> None:
    body, model = example(name), MODELS[name]
    before = model.model_validate(body["spec"])
    assert fixed_faults(before, before) == ()
    try:
        after = model.model_validate(changed(body, path, value)["spec"])
    except ValueError:
        return  # refused by itself
    assert any(words in fault for fault in fixed_faults(before, after)), fixed_faults(before, after)


def test_a_name_that_appears_is_a_change() -> None:
    body = example("flights")["spec"]
    body.pop("tableName", None)
    before = TabletGroupSpec.model_validate(body)
    after = TabletGroupSpec.model_validate({**body, "tableName": "other"})
    assert "tableName cannot change" in fixed_faults(before, after)[0]


def test_every_rule_has_a_known_form() -> None:
    found = [r["rule"] for m in MODELS.values() for r in transition_rules(structural_schema(m))]
    assert len(found) > 5
    for rule in found:
        holds(rule, {}, {})
    with pytest.raises(ValueError, match="unknown form"):
        holds("self > oldSelf", {}, {})
