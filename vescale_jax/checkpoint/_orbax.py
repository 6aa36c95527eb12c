"""Orbax: the logical tensors as an ordinary orbax tree that knows nothing of buffers, and such trees as a model.

Comes in: a model or a checkpoint; or the folder of an orbax checkpoint. Goes out: such a folder; or a model. In the
tree, paths are nested dicts. Tensors pass through a mapped file, so not all of them are in memory at a time.
"""

import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vescale_jax._sharded import Sharded

from ._dtypes import dtype_of
from ._exchange import Names, check_folder, fill_model
from ._safetensors import export_safetensors, read_header


def export_orbax(source: Any, path: "str | os.PathLike[str]", *, names: Any = None) -> Path:
    """Writes all logical tensors of a model as an orbax checkpoint: a tree of nested dicts, one array a tensor.

    In one process only; from a checkpoint, any one will do. Needs as much room again for a file beside it, which is
    removed at the end. Tensors without elements are left out, since orbax takes none.

    Arguments:

    - `source`, `names`: see `export_safetensors`; names are parted at "/".
    - `path`: a folder that does not exist yet.

    Returns: the folder.

    Raises: `ValueError` for a path that exists, and with several processes.
    """
    import orbax.checkpoint as ocp

    final = Path(path).absolute()
    _one_process("export_orbax")
    check_folder(final, "export_orbax")
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=".partial-") as folder:
        file = export_safetensors(source, Path(folder) / "tensors.safetensors", names=names)
        tree: dict[str, Any] = {}
        for name, tensor in read_header(file).items():
            if not math.prod(tensor.shape):
                continue
            *above, last = name.split("/")
            node = tree
            for part in above:
                node = node.setdefault(part, {})
            # Devices of the host take mapped memory as it is.
            node[last] = jax.device_put(tensor.read(), jax.local_devices(backend="cpu")[0])
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(final, args=ocp.args.PyTreeSave(tree))
    return final


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A tensor in an orbax checkpoint."""

    folder: Path
    tree: Any
    path: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self) -> np.ndarray:
        import orbax.checkpoint as ocp

        def chosen(path: tuple[Any, ...], leaf: Any) -> Any:
            del leaf
            return 0 if path == self.path else ocp.PLACEHOLDER

        item = jax.tree_util.tree_map_with_path(chosen, self.tree, is_leaf=_is_array)
        how = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray), item)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            found = checkpointer.restore(self.folder, args=ocp.args.PyTreeRestore(item=item, restore_args=how))
        return next(np.asarray(leaf) for leaf in jax.tree.leaves(found) if leaf is not ocp.PLACEHOLDER)


def import_orbax(
    path: "str | os.PathLike[str]",
    model: Sharded,
    *,
    names: Names = None,
    ignore: Sequence[str] = (),
    cast: bool = False,
) -> Sharded:
    """A model with the values of an orbax checkpoint, one tensor at a time.

    Arguments:

    - `path`: the folder of a tree that orbax's PyTree handler wrote, such as `StandardCheckpointer`'s or that of an
      item in a `CheckpointManager`'s step.
    - `model`, `names`, `ignore`, `cast`: see `import_safetensors`; a tensor's name is its path in the tree, parted
      by "/".

    Returns: the model.

    Raises: see `import_safetensors`; `ValueError` for a folder that orbax cannot read.
    """
    import orbax.checkpoint as ocp

    _one_process("import_orbax")
    folder = Path(path).absolute()
    problem = "no tree in it"
    described: Any = None
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            described = checkpointer.metadata(folder)
    except Exception as error:  # Of whatever kind orbax has for it.
        problem = str(error)
    tree = getattr(described, "item_metadata", described)
    tree = getattr(tree, "tree", tree)
    leaves: dict[str, Any] = {}
    for path_of, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_array):
        if _is_array(leaf):
            name = jax.tree_util.keystr(path_of, simple=True, separator="/")
            leaves[name] = _Leaf(folder, tree, path_of, tuple(leaf.shape), dtype_of(jnp.dtype(leaf.dtype).name))
    if not leaves:
        raise ValueError(
            f"import_orbax: {folder}: got a folder that orbax cannot read ({problem}); want that of a tree; pass the "
            "folder of the item, such as STEP/default or STEP/params"
        )
    return fill_model(model, leaves, names, ignore, cast, "import_orbax")


def _is_array(node: Any) -> bool:
    return hasattr(node, "shape") and hasattr(node, "dtype")


def _one_process(what: str) -> None:
    if jax.process_count() > 1:
        raise ValueError(
            f"{what}: got {jax.process_count()} processes; want one; run it in a program of its own, on a checkpoint"
        )
