"""What hypothesis draws for the planner: shapes, blocks, tensors and groups, small and odd on purpose."""

from hypothesis import strategies as st

from vescale_planner import Block, Elements, Rows, Slab, TensorSpec, Tile, WholeTensor

small = st.integers(1, 7)


@st.composite
def specs(draw: st.DrawFn, name: str = "t", largest_dim: int = 9) -> TensorSpec:
    """One tensor: scalars, empty tensors and blocks that do not divide it included."""
    shape = tuple(draw(st.lists(st.integers(0, largest_dim), max_size=4)))
    blocks: list[st.SearchStrategy[Block]] = [
        st.builds(Elements, small),
        st.builds(Rows, small),
        st.builds(Tile, small, small),
        st.builds(Slab, st.integers(0, len(shape)), small),
        st.builds(WholeTensor),
    ]
    return TensorSpec(name, shape, draw(st.one_of(blocks)))


@st.composite
def groups(draw: st.DrawFn, largest: int = 6) -> list[TensorSpec]:
    """A group of up to `largest` tensors, named t0, t1, ..."""
    return [draw(specs(f"t{i}")) for i in range(draw(st.integers(0, largest)))]
