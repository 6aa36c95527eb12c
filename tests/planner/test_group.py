"""plan_group: golden cases, edges, and the faults of a request."""

import os
import subprocess
import sys

import pytest

from vescale_planner import Elements, GroupPlan, Rows, TensorSpec, WholeTensor, plan_group

# (size, granularity) of each tensor, shards, best size for the given order, best size for any order
GOLDEN = [
    ([(12, 6), (16, 4), (16, 4), (2, 2), (6, 6)], 5, 12, 12),
    ([(1, 1), (6, 2)], 4, 2, 2),
    ([(15, 5), (3, 3)], 5, 5, 5),
    ([(28, 4), (27, 3), (6, 3), (6, 2)], 4, 18, 18),
    ([(2, 2), (15, 5), (2, 1)], 4, 10, 5),
    ([(30, 5), (14, 7)], 4, 15, 15),
]


def group_of(sizes: list[tuple[int, int]]) -> list[TensorSpec]:
    return [TensorSpec(f"t{i}", (size,), Elements(unit)) for i, (size, unit) in enumerate(sizes)]


@pytest.mark.parametrize(("sizes", "num_shards", "given_order", "any_order"), GOLDEN)
def test_golden(sizes: list[tuple[int, int]], num_shards: int, given_order: int, any_order: int) -> None:
    assert plan_group(group_of(sizes), num_shards, order="default").shard_size == given_order
    assert plan_group(group_of(sizes), num_shards).shard_size == any_order


def test_small_groups_are_proven_optimal() -> None:
    plan = plan_group(group_of([(28, 4), (27, 3), (6, 3), (6, 2)]), 4)
    assert (plan.bound.shard_size, plan.bound.reason, plan.lower_bound_ratio) == (18, "all orders tried", 1.0)


def test_golden_offsets() -> None:
    plan = plan_group(group_of([(30, 5), (14, 7)]), 4, order="default")
    assert [slot.offset for slot in plan.slots.values()] == [0, 30]


def test_a_scalar_an_empty_tensor_and_nothing() -> None:
    assert plan_group([], 7).buffer_size == 0
    assert plan_group([TensorSpec("empty", (0, 4))], 7).shard_size == 0
    plan = plan_group([TensorSpec("scalar", ()), TensorSpec("empty", (3, 0))], 7)
    assert (plan.shard_size, plan.padding) == (1, 6)


def test_one_shard_has_no_padding() -> None:
    plan = plan_group([TensorSpec("a", (7, 3), Rows(2)), TensorSpec("b", (5,), WholeTensor())], 1)
    assert (plan.shard_size, plan.padding_ratio, plan.gaps) == (26, 0.0, ())


@pytest.mark.unchecked_annotations
def test_faults_come_together() -> None:
    twice = [TensorSpec("a", (1,)), TensorSpec("a", (2,))]
    with pytest.raises(ValueError, match="5 faults") as caught:
        plan_group(twice, 0, -1, order="best", search_seconds=-1.0)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "plan_group: 5 faults\n"
        "  num_shards: got 0; want at least 1; pass num_shards=1 or more\n"
        "  alignment: got -1; want at least 1; pass alignment=1 or more\n"
        "  order: got 'best'; want one of default, block, shape, size, search; pass one of these\n"
        "  search_seconds: got -1.0; want at least 0; pass search_seconds=0 or more\n"
        "  a: got the name twice; want a name used once in a group; give each tensor its own name"
    )


@pytest.mark.unchecked_annotations
def test_types_come_first() -> None:
    with pytest.raises(TypeError, match="2 faults") as caught:
        plan_group([(3, 4)], True)  # type: ignore[list-item]
    assert str(caught.value) == (
        "plan_group: 2 faults\n"
        "  specs[0]: got (3, 4); want a TensorSpec; pass TensorSpec(name, shape, block)\n"
        "  num_shards: got True; want an integer; pass a plain int"
    )


def test_importing_the_planner_imports_nothing_else() -> None:
    code = (
        "import sys; before = set(sys.modules); import vescale_planner;"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(new - set(sys.stdlib_module_names) - {'vescale_planner'}))"
    )
    env = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout == "[]\n"


def test_plans_are_of_the_public_type() -> None:
    assert isinstance(plan_group([], 1), GroupPlan)


def test_a_billion_shards() -> None:
    plan = plan_group([TensorSpec("a", (10**6, 10**3)), TensorSpec("b", (7,), Elements(2))], 10**9)
    assert plan.shard_size == 2
    assert plan.lower_bound_ratio == 1.0
