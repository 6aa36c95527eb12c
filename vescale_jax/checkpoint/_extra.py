"""Extra: the user's own small tree beside the state, such as the position in the data, as JSON and arrays.

Comes in: dicts with string keys, lists, tuples, numbers, strings, booleans, None, and arrays. Goes out: JSON in which
an array is `{"$array": its name}`, and the arrays by name; and the tree again, tuples as lists and arrays as NumPy
arrays.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vescale_jax._form import is_array, is_key
from vescale_planner import Faults

from ._dtypes import dtype_of


def encode(extra: Any, what: str) -> tuple[Any, dict[str, np.ndarray]]:
    """Takes the arrays out of a tree.

    Arguments:

    - `extra`: see above.
    - `what`: the public name of the caller, for messages.

    Returns: what `json.dumps` takes, and the arrays by name.

    Raises: `TypeError` that names everything which cannot be kept.
    """
    faults, arrays = Faults(what), dict[str, np.ndarray]()
    record = _encode(extra, "extra", faults, arrays)
    faults.raise_if_any(TypeError)
    return record, arrays


def _encode(node: Any, path: str, faults: Faults, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(node, Mapping):
        for key in node:
            if not isinstance(key, str) or key.startswith("$"):
                want = "strings that do not start with '$'"
                faults.add(path, got=f"the key {key!r}", want=want, change="rename it")
        return {str(key): _encode(item, f"{path}/{key}", faults, arrays) for key, item in node.items()}
    if isinstance(node, list | tuple):
        return [_encode(item, f"{path}/{i}", faults, arrays) for i, item in enumerate(node)]
    if node is None or isinstance(node, bool | int | str):
        return node
    if isinstance(node, float):
        return node if math.isfinite(node) else {"$float": repr(node)}
    if not is_array(node) or isinstance(node, jax.ShapeDtypeStruct):
        want = "numbers, strings, None, arrays, and dicts and lists of them"
        faults.add(path, got=f"a {type(node).__name__}", want=want, change="convert it or leave it out")
        return None
    if isinstance(node, jax.Array) and not (node.is_fully_addressable or node.is_fully_replicated):
        want = "one that every process has whole"
        faults.add(path, got="an array cut over processes", want=want, change="gather it, or keep it in the model")
        return None
    name = f"extra{len(arrays)}"
    if is_key(node):
        arrays[name] = np.asarray(jax.random.key_data(node))
        return {"$array": name, "dtype": "key", "impl": str(jax.random.key_impl(node))}
    array = np.asarray(node)
    # The name of a dtype says nothing of the order of its bytes.
    arrays[name] = array.astype(array.dtype.newbyteorder("="), copy=False)
    if arrays[name].dtype.kind in "OSU" or arrays[name].dtype.names:
        want = "numbers or booleans"
        faults.add(path, got=f"an array of {arrays[name].dtype}", want=want, change="convert it or leave it out")
    return {"$array": name, "dtype": arrays[name].dtype.name}


def decode(record: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """The inverse of `encode`.

    Arguments:

    - `record`: what `json.loads` returned.
    - `arrays`: by name, in the dtypes on disk.
    """
    if isinstance(record, list):
        return [decode(item, arrays) for item in record]
    if not isinstance(record, dict):
        return record
    if "$float" in record:
        return float(record["$float"])
    if "$array" in record:
        array = arrays[record["$array"]]
        if record["dtype"] == "key":
            return jax.random.wrap_key_data(jnp.asarray(array), impl=record["impl"])
        return array.view(dtype_of(record["dtype"]))
    return {key: decode(item, arrays) for key, item in record.items()}
