"""TensorSpec and blocks: what they accept and what they say of the rest."""

import pytest

from vescale_planner import Elements, Rows, Slab, TensorSpec, Tile, WholeTensor

pytestmark = pytest.mark.unchecked_annotations


def test_a_spec_is_a_value() -> None:
    spec = TensorSpec("a", (2, 3))
    assert spec == TensorSpec("a", [2, 3], Elements(1))  # type: ignore[arg-type]
    assert hash(spec) == hash(TensorSpec("a", (2, 3)))
    assert (spec.size, spec.granularity, spec.shape) == (6, 1, (2, 3))
    assert TensorSpec("scalar", ()).size == 1


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("", (-1,)), ValueError, "TensorSpec: 2 faults\n  name: got ''; want a name; pass the parameter's path\n"
         "  : got shape (-1,); want dims of at least 0; pass array.shape"),
        (("a", (2, 3), Slab(3)), ValueError, "TensorSpec: 1 fault\n"
         "  a: got Slab(3) on shape (2, 3); want at most 2 dims; use Slab(2) or another block"),
        ((3, (2.5,), "rows"), TypeError, "TensorSpec: 3 faults\n"
         "  name: got 3; want a string; pass the parameter's path\n"
         "  3: got shape (2.5,); want a tuple of integers; pass array.shape\n"
         "  3: got block 'rows'; want Elements, Rows, Tile, Slab or WholeTensor; pass an instance of one of them"),
    ],
)  # fmt: skip
def test_faults_of_a_spec(arguments: tuple[object, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        TensorSpec(*arguments)  # type: ignore[arg-type]
    assert str(caught.value) == text


@pytest.mark.parametrize("block", [Elements, Rows, lambda n: Tile(n, 2), lambda n: Tile(2, n), lambda n: Slab(1, n)])
def test_faults_of_blocks(block: object) -> None:
    for wrong, error in ((0, ValueError), (-2, ValueError), (1.5, TypeError), (True, TypeError), ("3", TypeError)):
        with pytest.raises(error, match=r": got .*; want .*; pass "):
            block(wrong)  # type: ignore[operator]


def test_a_slab_may_keep_everything_together() -> None:
    assert TensorSpec("a", (2, 3), Slab(0)).granularity == 6


def test_blocks_print_as_on_the_command_line() -> None:
    blocks = [Elements(8), Rows(128), Tile(32, 64), Slab(1), WholeTensor()]
    assert [str(block) for block in blocks] == ["elements:8", "rows:128", "tile:32,64", "slab:1,1", "whole"]
