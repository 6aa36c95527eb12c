"""Units: layers found by name, the user's patterns and functions, and the cap in bytes."""

import pytest

from vescale_jax._units import UnitRule, assign, natural
from vescale_planner import Faults

NNX = ["embed/embedding", *(f"layers/{i}/{p}" for i in range(12) for p in ("up/kernel", "up/bias")), "head/kernel"]
LINEN = ["Block_0/Dense_0/kernel", "Block_0/Dense_1/kernel", "Block_1/Dense_0/kernel", "Dense_0/kernel", "Dense_1/bias"]


def units(paths: list[str], rule: UnitRule = None, cap: int | None = None, size: int = 4) -> dict[str, list[str]]:
    faults = Faults("fully_shard")
    found = assign(dict.fromkeys(paths, size), rule, cap, faults)
    faults.raise_if_any()
    return found


def test_every_layer_of_a_list_is_a_unit_and_the_rest_is_root() -> None:
    found = units(NNX)
    assert list(found) == ["root", *(f"layers/{i}" for i in range(12))]
    assert found["root"] == ["embed/embedding", "head/kernel"]
    assert found["layers/10"] == ["layers/10/up/bias", "layers/10/up/kernel"]


def test_every_parameter_is_in_one_unit() -> None:
    for rule in (None, ("layers/*", "head"), lambda path: path[0]):
        assert sorted(path for members in units(NNX, rule).values() for path in members) == sorted(NNX)


def test_a_module_that_is_itself_a_list_has_units() -> None:
    assert list(units(["0/kernel", "1/kernel"])) == ["0", "1"]


def test_a_list_of_one_layer_is_a_unit() -> None:
    assert list(units(["layers/0/kernel"])) == ["layers/0"]


def test_an_inner_list_does_not_cut_its_layer() -> None:
    assert list(units(["layers/0/experts/0/w", "layers/0/experts/1/w", "layers/1/norm"])) == ["layers/0", "layers/1"]


def test_linen_numbers_are_layers_where_siblings_share_the_name() -> None:
    found = units(LINEN)
    # Dense_0 and Dense_1 hold parameters themselves: layers of one matrix are no units.
    assert list(found) == ["root", "Block_0", "Block_1"]
    assert found["root"] == ["Dense_0/kernel", "Dense_1/bias"]


def test_one_numbered_linen_module_alone_is_no_list() -> None:
    assert list(units(["Block_0/Dense_0/kernel", "Block_0/Dense_1/kernel"])) == ["root"]


def test_numbers_at_the_end_of_a_path_are_arrays_and_no_layers() -> None:
    assert list(units(["weights/0", "weights/1"])) == ["root"]


def test_layers_are_in_natural_order() -> None:
    assert sorted(["l/10", "l/9", "l/1"], key=natural) == ["l/1", "l/9", "l/10"]
    assert sorted(["b2", "b10", "a"], key=natural) == ["a", "b2", "b10"]


def test_patterns_name_prefixes() -> None:
    found = units(NNX, ("layers/*", "embed"))
    assert list(found) == ["root", "embed", *(f"layers/{i}" for i in range(12))]
    assert found["root"] == ["head/kernel"]


def test_the_longest_pattern_wins() -> None:
    found = units(["a/0/x/w", "a/0/y/w", "a/1/x/w"], ("a/*", "a/*/x"))
    assert found == {"a/0": ["a/0/y/w"], "a/0/x": ["a/0/x/w"], "a/1/x": ["a/1/x/w"]}


def test_a_function_names_units() -> None:
    assert units(["a", "b", "c"], lambda path: None if path == "a" else "both") == {"root": ["a"], "both": ["b", "c"]}


def test_no_parameters_are_no_units() -> None:
    assert units([]) == {}


def test_a_cap_gives_large_parameters_their_own_unit_and_cuts_the_rest() -> None:
    faults = Faults("fully_shard")
    sizes = {"big": 100, "a": 6, "b": 6, "c": 6}
    found = assign(sizes, None, 12, faults)
    assert found == {"root": ["a", "b"], "root.1": ["c"], "big": ["big"]}
    assert not faults


def test_a_unit_at_the_cap_is_left_whole() -> None:
    assert units(["a", "b", "c"], cap=12) == {"root": ["a", "b", "c"]}


@pytest.mark.parametrize("cap", [1, 4, 5, 9, 13, 1000])
def test_units_obey_the_cap_or_hold_one_parameter(cap: int) -> None:
    found = units(NNX, cap=cap)
    assert all(4 * len(members) <= cap or len(members) == 1 for members in found.values())
    assert sorted(path for members in found.values() for path in members) == sorted(NNX)


@pytest.mark.parametrize("name", ["root", "root.1"])
def test_a_parameter_that_is_called_as_a_unit_is_not_lost(name: str) -> None:
    sizes = {name: 100, "a": 6, "b": 6, "c": 6}
    found = assign(sizes, None, 12, Faults("fully_shard"))
    assert sorted(path for members in found.values() for path in members) == sorted(sizes)
