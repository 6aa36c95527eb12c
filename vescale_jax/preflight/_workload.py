"""Workload: what the user wants to train, in the form in which it can be compiled without a device.

In comes the name of a function of the user's; out goes the `Workload` that it makes for a mesh.
"""

import importlib
import inspect
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh


@dataclass(frozen=True)
class Workload:
    """One training step for shapes, without arrays.

    Arguments:

    - `step`: what `vs.train_step` returned, or anything with `lower(state, batch)`, such as a jitted function.
    - `state`: abstract: shapes, dtypes and shardings, as `vs.train_state` makes of a model that is `abstract`.
    - `batch`: abstract, global: rows on dim 0.
    - `tokens`: of the global batch. None: the elements of the batch's largest array of integers.
    - `flops_per_token`: of forward and backward pass, without the products of parameters: attention, say. For causal
      attention over T tokens, with H heads of width K in each of L layers, 6 * L * H * K * T.
    - `active_parameters`: parameters that a token meets, where these are not all, as in a mixture of experts. None: all
      of the model.
    """

    step: Any
    state: Any
    batch: Any
    tokens: int | None = None
    flops_per_token: float = 0.0
    active_parameters: int | None = None

    def __post_init__(self) -> None:
        if not callable(getattr(self.step, "lower", None)):
            raise TypeError(
                f"Workload: step: got {type(self.step).__name__}; want something with lower(state, batch); pass what "
                "vs.train_step returned, or a jitted function"
            )
        if self.tokens is not None and self.tokens < 1:
            raise ValueError(f"Workload: tokens: got {self.tokens}; want a positive number; leave it out to count them")

    @property
    def num_tokens(self) -> int:
        """Tokens of the global batch; zero for a batch without integers."""
        if self.tokens is not None:
            return self.tokens
        integers = [leaf for leaf in jax.tree.leaves(self.batch) if jnp.issubdtype(leaf.dtype, jnp.integer)]
        return max((math.prod(leaf.shape) for leaf in integers), default=0)


def load_workload(path: str, mesh: Mesh, settings: Mapping[str, Any]) -> Workload:
    """The workload that the function at a path makes.

    Arguments:

    - `path`: `package.file:function`. The function is given the mesh, and returns a `Workload`, or a tuple of its
      first three fields.
    - `mesh`: of the devices to compile for.
    - `settings`: keyword arguments for the function.

    Raises: `ValueError` for a path that leads to no function or settings it does not take, `TypeError` for a function
    that returns something else.
    """
    name, colon, function = path.partition(":")
    if not (name and colon and function):
        raise ValueError(f"--module: got {path!r}; want package.file:function; name a function that takes a mesh")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # As `python -m` does, also when started by another way.
    try:
        make = getattr(importlib.import_module(name), function)
    except (ModuleNotFoundError, AttributeError) as error:
        change = "run the command where the package can be imported"
        raise ValueError(f"--module: got {path!r}; want a function that exists; {change} ({error})") from error
    if not callable(make):
        raise ValueError(f"--module: got {path!r}, a {type(make).__name__}; want a function of a mesh; name such a one")
    try:
        inspect.signature(make).bind(mesh, **settings)
    except TypeError as error:
        want = f"a function of a mesh that takes {sorted(settings) or 'nothing else'}"
        raise ValueError(f"--module: got {path!r}; want {want}; mend --set or the function ({error})") from error
    made = make(mesh, **settings)
    if isinstance(made, tuple) and len(made) == 3:
        made = Workload(*made)
    if not isinstance(made, Workload):
        raise TypeError(
            f"--module: {path}: got {type(made).__name__}; want a Workload, or (step, abstract state, abstract batch); "
            "return vescale_jax.preflight.Workload(step, state, batch)"
        )
    return made
