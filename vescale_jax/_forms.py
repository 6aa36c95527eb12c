"""Forms: what fully_shard needs to know of an nnx module, of a linen module, and of a bare pytree.

Comes in: the user's model, or a function that builds it. Goes out: `Parts`, the parameters by path and the rest as a
flat tuple; and a `Form`, the static recipe that puts both together again, inside the loss as well as at the end.
Only parameters are sharded. The rest (batch statistics, random keys, counters, tables) stays whole on every device.

The three forms are three small classes with the same five methods; nothing else in the library knows which one it has.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from flax import linen, nnx
from vescale_planner import Faults

Leaf = Any
"""An array, or a `jax.ShapeDtypeStruct` where only shapes are known."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A model taken apart.

    Attributes:

    - `params`: parameters by path, such as `"layers/0/attention/query/kernel"`.
    - `rest`: leaves of everything else, in the form's order.
    """

    params: dict[str, Leaf]
    rest: tuple[Leaf, ...]


class Form(Protocol):
    """How a model is put together from its parts."""

    @property
    def rest_paths(self) -> tuple[str, ...]:
        """Paths of the leaves of the rest."""
        ...

    def inside(self, params: Mapping[str, Leaf], rest: tuple[Leaf, ...]) -> Any:
        """What the user's loss function is given: called while the step is traced."""
        ...

    def rest_after(self, model: Any, rest: tuple[Leaf, ...]) -> tuple[Leaf, ...]:
        """The rest after the loss function has used what `inside` returned."""
        ...

    def whole(self, params: Mapping[str, Leaf], rest: tuple[Leaf, ...]) -> Any:
        """The model as the user gave it, with whole parameters."""
        ...


def path_name(path: tuple[Any, ...]) -> str:
    """A key path as text: `layers/0/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array with or without values."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed random keys."""
    return is_array(leaf) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


@dataclass(frozen=True)
class NNXForm:
    """An `nnx.Module`: its `nnx.Param` variables are the parameters."""

    graphdef: Any
    params_treedef: Any
    params_paths: tuple[str, ...]
    rest_treedef: Any
    rest_paths: tuple[str, ...]

    @classmethod
    def split(cls, model: nnx.Module) -> tuple[Parts, "NNXForm"]:
        """Takes a module apart; shared variables appear once, under their first path."""
        _mark_traced_arrays(model)
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        params_paths, params_leaves, params_treedef = _flatten_state(params)
        rest_paths, rest_leaves, rest_treedef = _flatten_state(rest)
        form = cls(graphdef, params_treedef, params_paths, rest_treedef, rest_paths)
        return Parts(dict(zip(params_paths, params_leaves, strict=True)), tuple(rest_leaves)), form

    def inside(self, params: Mapping[str, Leaf], rest: tuple[Leaf, ...]) -> nnx.Module:
        """The module itself, merged."""
        leaves = [params[path] for path in self.params_paths]
        state = jax.tree.unflatten(self.params_treedef, leaves), jax.tree.unflatten(self.rest_treedef, rest)
        return nnx.merge(self.graphdef, *state)

    whole = inside

    def rest_after(self, model: nnx.Module, rest: tuple[Leaf, ...]) -> tuple[Leaf, ...]:
        """The variables that were there before, with their new values; sown ones are dropped."""
        paths, leaves, _ = _flatten_state(nnx.split(model, nnx.Param, ...)[2])
        found = dict(zip(paths, leaves, strict=True))
        return tuple(found.get(path, old) for path, old in zip(self.rest_paths, rest, strict=True))


def _flatten_state(state: Any) -> tuple[tuple[str, ...], list[Leaf], Any]:
    flat, treedef = jax.tree_util.tree_flatten_with_path(state)
    # A variable is a node whose one child is its value: not part of the path that the user wrote.
    paths = tuple(path_name(path).removesuffix("/value").removesuffix("/.value") for path, _ in flat)
    return paths, [leaf for _, leaf in flat], treedef


def _mark_traced_arrays(model: nnx.Module) -> None:
    """Declares arrays that are plain attributes as data when the module was built while tracing.

    nnx does so by itself for concrete arrays; a traced one it takes for static, and the tracer would leak.
    """
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Pytree):
            for name, value in list(vars(node).items()):
                if isinstance(value, jax.core.Tracer):
                    setattr(node, name, nnx.data(value))


@dataclass(frozen=True)
class LinenForm:
    """A linen module with its variables: the collection `params` holds the parameters.

    The loss function is given the module bound to its variables, so `model(x)` and `model.method(x)` work as they do
    with nnx. Random streams are `rngs`, by name; each step folds a counter into them.
    """

    module: linen.Module
    params_treedef: Any
    params_paths: tuple[str, ...]
    rest_treedef: Any
    rest_paths: tuple[str, ...]

    @classmethod
    def split(cls, module: linen.Module, variables: Any, rngs: Mapping[str, Any]) -> tuple[Parts, "LinenForm"]:
        """Takes variables apart and unboxes them: boxes carry per-tensor shardings, which a flat buffer replaces."""
        if not isinstance(variables, Mapping) or "params" not in variables:
            keys = list(variables) if isinstance(variables, Mapping) else type(variables).__name__
            raise ValueError(
                f"fully_shard: params: got {keys}; want the variables of the linen module, a mapping with the "
                "collection 'params'; pass what module.init returns, or {'params': params}"
            )
        variables = dict(linen.meta.unbox(variables))
        flat, params_treedef = jax.tree_util.tree_flatten_with_path(variables.pop("params"))
        counter = {"count": np.zeros((), np.uint32)} if rngs else {}
        rest = {"collections": variables, "rngs": dict(rngs), **counter}
        rest_flat, rest_treedef = jax.tree_util.tree_flatten_with_path(rest)
        paths = tuple(path_name(path) for path, _ in flat)
        rest_paths = tuple(path_name(path).removeprefix("collections/") for path, _ in rest_flat)
        form = cls(module, params_treedef, paths, rest_treedef, rest_paths)
        return Parts(dict(zip(paths, [x for _, x in flat], strict=True)), tuple(x for _, x in rest_flat)), form

    def inside(self, params: Mapping[str, Leaf], rest: tuple[Leaf, ...]) -> linen.Module:
        """The module bound to its variables."""
        state = jax.tree.unflatten(self.rest_treedef, rest)
        rngs = {name: jax.random.fold_in(key, state["count"]) for name, key in state["rngs"].items()}
        variables = {"params": self._params(params), **state["collections"]}
        return self.module.bind(variables, rngs=rngs or None, mutable=list(state["collections"]) or False)

    def rest_after(self, model: linen.Module, rest: tuple[Leaf, ...]) -> tuple[Leaf, ...]:
        """The collections as the module left them, and the counter one on; new collections are dropped."""
        state = jax.tree.unflatten(self.rest_treedef, rest)
        after = {name: model.variables.get(name, old) for name, old in state["collections"].items()}
        counter = {"count": state["count"] + np.uint32(1)} if "count" in state else {}
        leaves = jax.tree.leaves({"collections": after, "rngs": state["rngs"], **counter})
        return tuple(leaves) if len(leaves) == len(rest) else rest

    def whole(self, params: Mapping[str, Leaf], rest: tuple[Leaf, ...]) -> dict[str, Any]:
        """The variables, as `module.init` returns them (unboxed)."""
        return {"params": self._params(params), **jax.tree.unflatten(self.rest_treedef, rest)["collections"]}

    def _params(self, params: Mapping[str, Leaf]) -> Any:
        return jax.tree.unflatten(self.params_treedef, [params[path] for path in self.params_paths])


@dataclass(frozen=True)
class TreeForm:
    """A bare pytree of arrays for a pure function: every array is a parameter, except random keys."""

    treedef: Any
    is_param: tuple[bool, ...]
    paths: tuple[str, ...]

    @classmethod
    def split(cls, tree: Any) -> tuple[Parts, "TreeForm"]:
        """Takes a pytree apart.

        Raises: `TypeError` that names every leaf which is no array.
        """
        flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
        faults = Faults("fully_shard")
        for path, leaf in flat:
            if not is_array(leaf):
                got = f"a leaf of type {type(leaf).__name__}"
                change = "wrap it in jnp.asarray, or keep it out of the tree"
                faults.add(path_name(path), got=got, want="an array", change=change)
        faults.raise_if_any(TypeError)
        paths = tuple(path_name(path) for path, _ in flat)
        is_param = tuple(not is_key(leaf) for _, leaf in flat)
        params = {p: leaf for p, (_, leaf), keep in zip(paths, flat, is_param, strict=True) if keep}
        rest = tuple(leaf for (_, leaf), keep in zip(flat, is_param, strict=True) if not keep)
        return Parts(params, rest), cls(treedef, is_param, paths)

    @property
    def rest_paths(self) -> tuple[str, ...]:
        """Paths of the random keys."""
        return tuple(path for path, keep in zip(self.paths, self.is_param, strict=True) if not keep)

    def inside(self, params: Mapping[str, Leaf], rest: tuple[Leaf, ...]) -> Any:
        """The pytree."""
        others = iter(rest)
        leaves = [
            params[path] if keep else next(others) for path, keep in zip(self.paths, self.is_param, strict=True)
        ]
        return jax.tree.unflatten(self.treedef, leaves)

    whole = inside

    def rest_after(self, model: Any, rest: tuple[Leaf, ...]) -> tuple[Leaf, ...]:
        """The same rest: a pure function changes nothing."""
        del model
        return rest


def split_model(model: Any, params: Any, rngs: Mapping[str, Any]) -> tuple[Parts, Form]:
    """Takes a concrete model apart, whatever its form.

    Arguments:

    - `model`: an `nnx.Module`, a `linen.Module`, or a pytree of arrays.
    - `params`: the variables of a linen module; None otherwise.
    - `rngs`: random keys by stream, for linen modules.
    """
    if isinstance(model, linen.Module):
        return LinenForm.split(model, params, rngs)
    if isinstance(model, nnx.Module):
        return NNXForm.split(model)
    return TreeForm.split(model)


def builder(model: Any, params: Any, rngs: Mapping[str, Any]) -> Callable[[], tuple[Parts, Form]] | None:
    """A function that builds the model and takes it apart; None if the model is concrete already."""
    if isinstance(model, linen.Module):
        return (lambda: LinenForm.split(model, params(), rngs)) if callable(params) else None
    if isinstance(model, nnx.Module) or not callable(model):
        return None

    def build() -> tuple[Parts, Form]:
        built = model()
        return NNXForm.split(built) if isinstance(built, nnx.Module) else TreeForm.split(built)

    return build
