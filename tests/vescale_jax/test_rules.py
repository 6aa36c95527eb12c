"""Rules: a value, a mapping of patterns, or a function."""

from typing import Any

import pytest

from vescale_jax._rules import resolve
from vescale_planner import Faults

NAMES = ["embed", "layers/0/w", "layers/1/w"]


def resolved(rule: Any, default: Any = None) -> dict[str, Any]:
    faults = Faults("fully_shard")
    found = resolve(rule, NAMES, argument="blocks", default=default, faults=faults)
    faults.raise_if_any()
    return found


def test_a_value_is_for_all() -> None:
    assert resolved(7) == dict.fromkeys(NAMES, 7)


def test_a_pattern_is_for_those_it_matches() -> None:
    assert resolved({"layers/*": 7}, default=0) == {"embed": 0, "layers/0/w": 7, "layers/1/w": 7}


def test_the_first_pattern_that_matches_counts() -> None:
    assert resolved({"layers/0/*": 1, "layers/*": 2, "*": 3}) == {"embed": 3, "layers/0/w": 1, "layers/1/w": 2}


def test_a_pattern_that_never_comes_first_is_still_used() -> None:
    assert resolved({"*": 1, "embed": 2}) == dict.fromkeys(NAMES, 1)


def test_patterns_heed_upper_case() -> None:
    with pytest.raises(ValueError, match="'EMBED', which matches nothing"):
        resolved({"EMBED": 1})


def test_a_function_is_asked_for_every_name() -> None:
    assert resolved(len) == {"embed": 5, "layers/0/w": 10, "layers/1/w": 10}


def test_a_function_is_given_what_stands_beside_the_name() -> None:
    found = resolve(lambda name, n: n + 1, {"a": (1,), "b": (2,)}, argument="x", default=0, faults=Faults("f"))
    assert found == {"a": 2, "b": 3}


def test_every_pattern_that_matches_nothing_is_named() -> None:
    with pytest.raises(ValueError) as raised:
        resolved({"layer/*": 1, "embed": 2, "head": 3})
    want = "want patterns that match names such as embed, layers/0/w, layers/1/w; mend or drop it"
    assert str(raised.value) == (
        "fully_shard: 2 faults\n"
        f"  blocks: got pattern 'layer/*', which matches nothing; {want}\n"
        f"  blocks: got pattern 'head', which matches nothing; {want}"
    )
