"""Buffers: what an optimizer for blocks is given, checked once.

Comes in: the tree that `init` was given. Goes out: nothing, or an error that names every parameter whose blocks a shard
may cut, as the user's rules by path would.
"""

from collections.abc import Callable
from typing import Any

import jax

from vescale_jax._sharded import is_buffer
from vescale_jax._units import ROOT
from vescale_layouts import Layout
from vescale_planner import Faults


def check_buffers(optimizer: str, block_size: Any, params: Any, views: Callable[[Layout], Any]) -> None:
    """Raises unless all leaves are buffers whose plans keep all blocks whole, on every mesh.

    Arguments:

    - `optimizer`: its public name.
    - `block_size`: what it was called with.
    - `params`: what its `init` was given.
    - `views`: makes the block views of a group; raises `ValueError` with a line for each parameter at fault.

    Raises: `TypeError` for a leaf that is no buffer, `ValueError` that names every parameter whose blocks may be cut.
    """
    faults = Faults(f"{optimizer}(block_size={block_size!r})")
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_buffer):
        unit = jax.tree_util.keystr(path[:-1] or path, simple=True, separator="/")
        if not is_buffer(leaf):
            raise TypeError(
                f"{optimizer}: {unit}: got {type(leaf).__name__}; want a buffer of a sharded model; shard the model "
                "with fully_shard and pass model.params"
            )
        try:
            views(leaf.layout)
        except ValueError as error:
            for line in str(error).split("\n  ")[1:]:
                # Rules by path do not know of groups, and names of the root unit are whole.
                whole = unit == ROOT or line.startswith(unit)
                faults.absorb(ValueError(line if whole else f"{unit}/{line}"))
    faults.raise_if_any()
