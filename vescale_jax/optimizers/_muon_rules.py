"""Rules: which parameters Muon takes, as which matrices, and which ones AdamW takes, with the reason.

Comes in: paths and logical shapes, and what the user said. Goes out: a `Ruling` for each parameter. What a device holds
plays no part, so the rulings are the same on every mesh and under every grouping.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vescale_jax._rules import resolve
from vescale_planner import Faults

from ._muon_matrix import Matrix

Choice = Matrix | Literal["muon", "adamw"]
"""What a rule says of a parameter: the matrices that it is, those that its path and shape suggest, or AdamW."""

_QUERIES = frozenset(["query", "key", "value", "q", "k", "v", "q_proj", "k_proj", "v_proj", "qkv", "qkv_proj"])
_OUTPUTS = frozenset(["out", "o", "o_proj", "out_proj"])
_HEADS = frozenset(["head", "lm_head", "output_head", "classifier", "logits", "logits_dense", "unembed"])
_TABLES = ("embed", "wte", "wpe", "pos_emb", "position_emb")
_VECTORS = frozenset(["bias", "scale"])


@dataclass(frozen=True, slots=True)
class Ruling:
    """What becomes of one parameter.

    Attributes:

    - `name`: within its group.
    - `path`: of the parameter.
    - `matrix`: how it is taken for matrices; None: AdamW.
    - `reason`: in words.
    """

    name: str
    path: str
    matrix: Matrix | None
    reason: str


def rulings(
    names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], rules: Any, faults: Faults
) -> dict[str, Ruling]:
    """Decides for every parameter.

    Arguments:

    - `names`: by path, the names within the groups.
    - `shapes`: by path; without the dims of a stack of layers.
    - `rules`: see `muon`.
    - `faults`: takes patterns that match nothing, and matrices that do not fit their parameter.

    Returns: by path, in the order of `names`.
    """
    choices = resolve(rules, {path: (shapes[path],) for path in names}, argument="rules", default=None, faults=faults)
    found: dict[str, Ruling] = {}
    for path, name in names.items():
        choice, shape = choices[path], shapes[path]
        if isinstance(choice, Matrix):
            choice.check(path, shape, faults)
            found[path] = Ruling(name, path, choice, "asked for")
        elif choice == "adamw":
            found[path] = Ruling(name, path, None, "asked for")
        elif choice == "muon":
            if len(shape) < 2:
                want = "a parameter of two dims or more"
                faults.add(path, got=f"'muon' for shape {shape}", want=want, change="pass 'adamw', or no rule")
            found[path] = Ruling(name, path, dims_of(path, shape)[0], "asked for")
        elif choice is None:
            found[path] = Ruling(name, path, *default(path, shape))
        else:
            want = "a Matrix, 'muon', 'adamw' or None"
            faults.add(path, got=repr(choice), want=want, change="mend the rule")
    return found


def default(path: str, shape: tuple[int, ...]) -> tuple[Matrix | None, str]:
    """What is done with a parameter that no rule names, and why."""
    words = path.lower().split("/")
    if 0 in shape:
        return None, "no element"
    if len(shape) < 2:
        return None, "a scalar" if not shape else "a vector"
    if words[-1] in _VECTORS:
        return None, f"a {words[-1]}"
    if any(table in word for word in words for table in _TABLES):
        return None, "an embedding"
    if _HEADS.intersection(words):
        return None, "a head"
    return dims_of(path, shape)


def dims_of(path: str, shape: tuple[int, ...]) -> tuple[Matrix, str]:
    """Which dims are rows and columns, going by path and rank, and why."""
    words = path.lower().split("/")
    if len(shape) == 2:
        return Matrix(), "a matrix"
    attention = any("att" in word for word in words)
    if _QUERIES.intersection(words) and (attention or words[-1] == "kernel"):
        return Matrix((-3,), (-2, -1)), "attention, (in, heads, out)"
    if _OUTPUTS.intersection(words) and attention:
        return Matrix((-3, -2), (-1,)), "attention, (heads, in, out)"
    if any("conv" in word for word in words):
        return Matrix(tuple(range(len(shape) - 1)), (len(shape) - 1,)), "a convolution"
    return Matrix(), "matrices in the last two dims"
