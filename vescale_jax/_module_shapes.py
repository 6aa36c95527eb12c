"""The parameter shapes of a user's own module, without making its arrays.

In comes `package.file:function`; out go path and shape of every parameter. The function takes no arguments and returns
an `nnx.Module`, the variables of a linen module (`model.init(...)`), or any pytree of arrays. It runs under
`eval_shape`, so a model of any size can be looked at on a laptop.
"""

import importlib

import jax
from flax import nnx

from vescale_jax._model_shapes import Tensor


def module_shapes(path: str) -> tuple[Tensor, ...]:
    """Path and shape of every parameter that the function at `path` makes.

    Raises `ValueError` when `path` leads to no function or the function makes no parameters.
    """
    name, colon, function = path.partition(":")
    if not (name and colon and function):
        raise ValueError(f"--module: got {path!r}; want package.file:function; name the function that makes the module")
    try:
        make = getattr(importlib.import_module(name), function)
    except (ModuleNotFoundError, AttributeError) as error:
        change = "run the command where the package can be imported"
        raise ValueError(f"--module: got {path!r}; want a function that exists; {change} ({error})") from error
    made = nnx.eval_shape(make)
    if isinstance(made, nnx.Module):
        made = nnx.to_pure_dict(nnx.state(made, nnx.Param))
    elif isinstance(made, dict) and "params" in made:
        made = made["params"]
    leaves, _ = jax.tree.flatten_with_path(made)
    if not leaves:
        raise ValueError(f"--module: got {path!r}; want at least one parameter; return the module or its variables")
    return tuple((jax.tree_util.keystr(keys, simple=True, separator="/"), tuple(leaf.shape)) for keys, leaf in leaves)
