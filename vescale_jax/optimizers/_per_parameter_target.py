"""Target: the trainable parameters of a sharded model as an optimizer would see them without the library.

Comes in: a sharded model. Goes out: the tree of its logical parameters, shapes only, and where each lies in the
buffers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from vescale_jax._groups import each_group
from vescale_jax._rolled_form import RolledForm
from vescale_jax._sharded import Sharded, check_sharded
from vescale_layouts import DBuffer, Layout

from ._per_parameter_graph import Graph
from ._per_parameter_nodes import Dims, Home, Value


@dataclass(frozen=True)
class Buffer:
    """A trainable buffer of the model.

    Attributes:

    - `unit`, `group`: its names.
    - `prefix`: what its tensors' names lack to be paths.
    - `layout`: where each parameter lies.
    - `dtype`: of the parameters.
    """

    unit: str
    group: str
    prefix: str
    layout: Layout
    dtype: Any


@dataclass(frozen=True)
class Target:
    """The trainable parameters of a model, and the buffers they lie in.

    Attributes:

    - `buffers`: in the order of units and groups.
    - `tree`: the logical parameters, shapes only; `homes` are those of its leaves.
    - `shapes`, `paths`: of every parameter.
    """

    buffers: tuple[Buffer, ...]
    tree: Any
    homes: tuple[Home, ...]
    shapes: Mapping[Home, Dims]
    paths: Mapping[Home, str]

    @classmethod
    def of(cls, model: Sharded) -> "Target":
        structure = check_sharded(model, "per_parameter")
        buffers = tuple(
            Buffer(unit.name, group.name, group.prefix, group.layout, group.dtype)
            for unit, group in each_group(structure.units)
            if group.trainable
        )
        if not buffers:
            raise ValueError(
                "per_parameter: got a model without trainable parameters; want one at least; pass another rule for "
                "trainable to fully_shard"
            )
        if isinstance(structure.form, RolledForm):
            raise ValueError(
                "per_parameter: got a model with rolled lists of layers; want one whose parameters are those of its "
                "layers, since ranks, masks and trust ratios would be those of whole stacks; leave rolled out of "
                "fully_shard"
            )
        shapes: dict[Home, Dims] = {}
        paths: dict[Home, str] = {}
        for k, buffer in enumerate(buffers):
            for i, slot in enumerate(buffer.layout.plan.ordered_slots):
                shapes[k, i] = (*buffer.layout.stack, *slot.shape)
                paths[k, i] = buffer.prefix + slot.name
        by_path = {path: home for home, path in paths.items()}
        tree = _tree(structure.form, by_path)
        leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda node: isinstance(node, _Leaf))
        homes = tuple(by_path[leaf.path] for leaf in leaves)
        structs = [jax.ShapeDtypeStruct(shapes[home], buffers[home[0]].dtype) for home in homes]
        return cls(buffers, treedef.unflatten(structs), homes, shapes, paths)

    def arrays(self, tree: Any) -> list[Any]:
        """The arrays of a tree of buffers, in the order of `buffers`."""
        found: list[Any] = []
        for buffer in self.buffers:
            try:
                node = tree[buffer.unit][buffer.group]
            except (KeyError, TypeError, IndexError):
                node = None
            if not isinstance(node, DBuffer) or node.layout != buffer.layout:
                raise ValueError(
                    f"per_parameter: got a {type(tree).__name__} without the buffer {buffer.unit}/{buffer.group} of "
                    "the model that the optimizer was made for; want the buffers of that model; make the optimizer "
                    "anew with per_parameter(tx, model), and pass model.params"
                )
            found.append(node.data)
        return found

    def pack(self, arrays: Sequence[Any]) -> Any:
        """A tree of buffers."""
        tree: dict[str, dict[str, DBuffer]] = {}
        for buffer, array in zip(self.buffers, arrays, strict=True):
            tree.setdefault(buffer.unit, {})[buffer.group] = DBuffer(array, buffer.layout)
        return tree

    def leaf(self, graph: Graph, home: Home, first: int) -> Value:
        """A parameter in a buffer; the arrays of the buffers are inputs from `first` on."""
        axes = tuple((dim,) for dim in range(len(self.shapes[home])))
        return graph.input(first + home[0], home, axes, "shard", self.buffers[home[0]].dtype)


@dataclass(frozen=True)
class _Leaf:
    path: str


def _tree(form: Any, by_path: Mapping[str, Home]) -> Any:
    """The trainable parameters as the user knows them, with `_Leaf`s; see `per_parameter`."""
    if hasattr(form, "graphdef"):
        tree: dict[str, Any] = {}
        for path in by_path:
            *parents, name = path.split("/")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {}) if isinstance(node, dict) else {}
            if not isinstance(node, dict) or name in node:
                return {path: _Leaf(path) for path in by_path}
            node[name] = _Leaf(path)
        return tree
    treedef, paths = (
        (form.treedef, form.paths) if hasattr(form, "is_param") else (form.params_treedef, form.params_paths)
    )
    return treedef.unflatten([_Leaf(path) if path in by_path else None for path in paths])
