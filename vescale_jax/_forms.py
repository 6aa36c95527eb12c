"""Forms: which form a model has, and whether it exists yet."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen, nnx

from ._form import Form, Parts
from ._linen_form import LinenForm
from ._nnx_form import NNXForm
from ._sharded import Sharded
from ._tree_form import TreeForm


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
    # A pytree may be callable too, as equinox modules are: a builder is a function and nothing else.
    if isinstance(model, nnx.Module) or not callable(model) or not jax.tree_util.all_leaves([model]):
        return None

    def build() -> tuple[Parts, Form]:
        built = model()
        check_model(built)
        return NNXForm.split(built) if isinstance(built, nnx.Module) else TreeForm.split(built)

    return build


def check_model(model: Any) -> None:
    """Raises `TypeError` for what is no model by itself: nothing at all, a class, a linen module without variables."""
    got = "None" if model is None else f"the class {model.__name__}" if isinstance(model, type) else None
    if isinstance(model, Sharded):
        got = "a model that is sharded already"
    if isinstance(model, linen.Module):
        got = f"a function that builds the linen module {type(model).__name__}"
    if got:
        raise TypeError(
            f"fully_shard: model: got {got}; want an nnx module, a linen module with params=, a pytree of arrays, or a "
            "function that builds an nnx module or a pytree; mend what is passed or what the function returns"
        )
