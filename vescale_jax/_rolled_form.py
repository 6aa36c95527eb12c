"""The form of a model whose lists of equal layers are kept as stacks: `layers/0/w`, `layers/1/w` as `layers/w`.

Comes in: the parts and the form of a model, and which lists to roll. Goes out: parts with stacked parameters, and a
form that gives the model its list of layers back. The model's code does not change, nor what it is given.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax
import numpy as np
from jax import lax

from vescale_planner import Faults

from ._form import Form, Leaf, Parts
from ._rules import nothing_matches
from ._units import natural


@dataclass(frozen=True)
class RolledForm:
    """A form under which some parameters are stacks of what the model has in a list.

    Attributes:

    - `form`: of the model.
    - `rows`: for each stacked parameter the paths of its layers.
    """

    form: Form
    rows: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def rest_paths(self) -> tuple[str, ...]:
        """Paths of the leaves of the rest."""
        return self.form.rest_paths

    def inside(self, params: Mapping[str, Leaf], rest: tuple[Leaf, ...]) -> Any:
        """The model, whose layers are taken out of the stacks."""
        return self.form.inside(self.unrolled(params), rest)

    def rest_after(self, model: Any, rest: tuple[Leaf, ...]) -> tuple[Leaf, ...]:
        """The rest after the loss function has used what `inside` returned."""
        return self.form.rest_after(model, rest)

    def whole(self, params: Mapping[str, Leaf], rest: tuple[Leaf, ...]) -> Any:
        """The model as the user gave it, with whole parameters."""
        return self.form.whole(self.unrolled(params), rest)

    def unrolled(self, params: Mapping[str, Leaf]) -> dict[str, Leaf]:
        """Parameters by the model's own paths."""
        unrolled = dict(params)
        for path, layers in self.rows:
            stack = unrolled.pop(path)
            for i, layer in enumerate(layers):
                unrolled[layer] = lax.index_in_dim(stack, i, 0, keepdims=False)
        return unrolled


class Layers:
    """One parameter of all layers of a list, as an array with the layers on dim 0 that is not yet made."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        self.leaves = tuple(leaves)
        self.shape = (len(self.leaves), *self.leaves[0].shape)
        self.dtype = self.leaves[0].dtype

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        del copy
        return np.stack([np.asarray(leaf) for leaf in self.leaves]).astype(dtype or self.dtype)


def roll(parts: Parts, form: Form, rolled: Sequence[str], faults: Faults) -> tuple[Parts, Form, tuple[str, ...]]:
    """Stacks the parameters of lists of equal layers.

    Arguments:

    - `parts`, `form`: of the model.
    - `rolled`: patterns of lists: `layers` for `layers/0/...`, `Block` for `Block_0/...`.
    - `faults`: takes patterns that match nothing, and layers that are not equal.

    Returns: the stacked parts, their form, and the names of the stacks.
    """
    if isinstance(rolled, str) or not all(isinstance(pattern, str) for pattern in rolled):
        faults.add("rolled", got=repr(rolled), want="a sequence of patterns", change='pass ("layers",)')
        faults.raise_if_any(TypeError)
    lists = _lists(list(parts.params), rolled, faults)
    rows: dict[str, tuple[str, ...]] = {}
    for name, layers in lists.items():
        numbers = sorted(layers, key=int)
        first = {path: parts.params[full] for path, full in layers[numbers[0]].items()}
        for number in numbers[1:]:
            _compare(
                f"{name}, layer {number}", first, {p: parts.params[full] for p, full in layers[number].items()}, faults
            )
        rows |= {f"{name}/{path}": tuple(layers[n].get(path, "") for n in numbers) for path in first}
    faults.raise_if_any()
    taken = {path for layers in rows.values() for path in layers}
    params = {path: leaf for path, leaf in parts.params.items() if path not in taken}
    for path in rows:
        if path in params:
            faults.add(path, got="two parameters of this path", want="one", change="leave the list out of rolled")
    faults.raise_if_any()
    stacks = {path: _stacked([parts.params[layer] for layer in layers]) for path, layers in rows.items()}
    if not stacks:
        return parts, form, ()
    return Parts(params | stacks, parts.rest), RolledForm(form, tuple(rows.items())), tuple(lists)


def _stacked(leaves: Sequence[Leaf]) -> Leaf:
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return jax.ShapeDtypeStruct((len(leaves), *leaves[0].shape), leaves[0].dtype)
    return Layers(leaves)


def _lists(paths: Sequence[str], rolled: Sequence[str], faults: Faults) -> dict[str, dict[str, dict[str, str]]]:
    """The parameters' paths by list, layer number and path within the layer."""
    lists: dict[str, dict[str, dict[str, str]]] = {}
    used: set[str] = set()
    for path in sorted(paths, key=natural):
        parts = path.split("/")
        for i, part in enumerate(parts[:-1]):
            found = re.fullmatch(r"(?:(.*)_)?(\d+)", part)
            if not found:
                continue
            stem, number = found.groups()
            name = "/".join([*parts[:i], *([stem] if stem else [])])
            matching = [pattern for pattern in rolled if fnmatchcase(name, pattern)]
            if matching:
                used.update(matching)
                layers = lists.setdefault(name, defaultdict(dict))
                layers[number]["/".join(parts[i + 1 :])] = path
                break
    for pattern in rolled:
        if pattern in used:
            continue
        if any(fnmatchcase(path[:i], pattern) for path in paths for i, c in enumerate(path) if c == "/"):
            got = f"pattern {pattern!r}, which matches no list of layers such as {pattern}/0/..."
            change = f"parameters that have the layers on dim 0 go into stacks=({pattern!r},)"
            faults.add("rolled", got=got, want="patterns of lists", change=change)
        else:
            nothing_matches(faults, "rolled", pattern, paths)
    return lists


def _compare(name: str, first: Mapping[str, Any], layer: Mapping[str, Any], faults: Faults) -> None:
    want = "layers that are equal but for their values"
    change = "leave the list out of rolled, or make its layers equal"
    for path in first.keys() | layer.keys():
        if path not in layer or path not in first:
            got = f"{'no' if path not in layer else 'a'} parameter {path}, unlike layer 0"
            faults.add(name, got=got, want=want, change=change)
        elif (first[path].shape, first[path].dtype) != (layer[path].shape, layer[path].dtype):
            one, other = (f"{leaf.shape} {leaf.dtype}" for leaf in (layer[path], first[path]))
            got = f"{path} of shape {one}, in layer 0 {other}"
            faults.add(name, got=got, want=want, change=change)
