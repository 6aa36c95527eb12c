"""Dtypes on disk: what NumPy and zarr know is stored as it is, everything else as bits of the same width.

bfloat16, the float8 and float4 types and int4 lie as uint8 or uint16; the manifest says which dtype they are.
"""

from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from vescale_jax._form import is_key

_PLAIN = frozenset("biufc")


def stored_dtype(dtype: DTypeLike) -> np.dtype:
    """The dtype in which arrays of `dtype` lie on disk."""
    dtype = np.dtype(dtype)
    if dtype.kind in _PLAIN and dtype.isbuiltin == 1:
        return dtype
    return np.dtype(f"uint{8 * dtype.itemsize}")


def as_stored(array: np.ndarray) -> np.ndarray:
    """The same bits in the dtype that lies on disk; no copy."""
    return array.view(stored_dtype(array.dtype))


def dtype_of(name: str) -> np.dtype:
    """A dtype by the name that a manifest has.

    Raises: `TypeError` for an unknown one.
    """
    return np.dtype(name)


def key_kind(leaf: Any) -> str:
    """The implementation of random keys, with or without values; empty for other arrays."""
    found: list[str] = []
    if is_key(leaf):
        # JAX tells it of keys with values and while tracing only.
        jax.eval_shape(lambda key: found.append(str(jax.random.key_impl(key))), leaf)
    return "".join(found)


def without_keys(leaf: Any) -> Any:
    """Random keys as their data, with or without values; other arrays as they are."""
    if not is_key(leaf):
        return leaf
    read = jax.random.key_data
    return jax.eval_shape(read, leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else read(leaf)
