"""Codes: blocks of float32 numbers as 8-bit codes and one float32 scale a block, and back.

Comes in: blocks, on the last two dims, and their scales, which are the largest magnitudes. Goes out: a `uint8` code for
every element, and the value a code stands for. The value is `table[code] * scale`; the code is that of the entry of the
table that is nearest to `x / scale`, the one nearer to 0 of two that are equally near. Both are single roundings of
IEEE arithmetic, hence the same bits on every device, in every program, and in NumPy.

- *dynamic* (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861): entries are dense near
  0 and span seven decades; a code tells the decade and a fraction in it.
- *linear*: entries in equal steps.

Code 0 stands for 0 in all of them, so zeros are a legal state, and padding stays zero. A positive number is never coded
as 0 by an unsigned code: it is a divisor, and rounding it down to 0 would make a step without bound.
"""

import functools
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

CodeName = Literal["dynamic", "linear"]
"""How 256 codes are spread over the numbers from -1 to 1, or from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Code:
    """A way to write numbers in 8 bits.

    Attributes:

    - `name`: `"dynamic"` or `"linear"`.
    - `signed`: whether numbers may be negative.
    """

    name: CodeName
    signed: bool

    @property
    def table(self) -> np.ndarray:
        """The number that each of the 256 codes stands for, with scale 1: float32 (256,).

        Code k is the k-th number from 0 upwards; for signed codes, 256 - k is the k-th from 0 downwards.
        """
        table = np.zeros(256, np.float32)
        positive = _magnitudes(self)
        table[: len(positive)] = positive
        if self.signed:
            table[129:] = -positive[127:0:-1]
        return table

    def encode(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        """The codes of some numbers.

        Arguments:

        - `x`: float32, of any shape.
        - `scale`: float32, to be broadcast to `x`: not below any magnitude. Where it is 0 all codes are 0.

        Returns: uint8, of the shape of `x`.
        """
        search = _search(self)
        ratio = jnp.where(scale == 0, jnp.zeros_like(x), x / jnp.where(scale == 0, jnp.ones_like(scale), scale))
        magnitude = jnp.abs(ratio)
        bits = jax.lax.bitcast_convert_type(magnitude, jnp.int32)
        bucket = jnp.clip((bits >> _BUCKET_BITS) - _FIRST_BUCKET, 0, len(search.start) - 1)
        place = jnp.asarray(search.start)[bucket]
        for _ in range(search.steps):
            place = place + (magnitude > jnp.asarray(search.bounds)[place])
        if self.signed:
            # There are 128 positive numbers and 127 negative ones.
            place = jnp.where(ratio < 0, -jnp.minimum(place, 127), place)
        return place.astype(jnp.uint8)

    def decode(self, codes: jax.Array, scale: jax.Array) -> jax.Array:
        """The numbers that codes stand for.

        Arguments:

        - `codes`: uint8.
        - `scale`: float32, to be broadcast to `codes`.

        Returns: float32, of the shape of `codes`.
        """
        return jnp.asarray(self.table)[codes.astype(jnp.int32)] * scale


@functools.lru_cache(maxsize=4)
def _magnitudes(code: Code) -> np.ndarray:
    """The numbers from 0 upwards that a code can stand for: float32, ascending."""
    if code.name == "linear":
        steps = 127 if code.signed else 255
        return (np.arange(steps + 1) / steps).astype(np.float32)
    found = [0.0, 1.0]
    for decade in range(7):
        # Each decade has twice the fractions of the one below; without a sign there is a bit more for them.
        edges = np.linspace(0.1, 1, 2 ** (decade + (0 if code.signed else 1)) + 1)
        found += [*(10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2)]
    return np.sort(np.array(found)).astype(np.float32)


# Magnitudes are sorted into buckets by their exponent and 7 bits of the fraction, from 2**-22 to 1.
_BUCKET_BITS = 23 - 7
_FIRST_BUCKET = (127 - 22) << 7
_BUCKETS = (22 << 7) + 1


@dataclass(frozen=True, slots=True, eq=False)
class _Search:
    """How to find the place of a magnitude among those that a code can stand for.

    Attributes:

    - `bounds`: float32; magnitudes above bound k belong to place k + 1 or higher. The last one is infinite.
    - `start`: int32, for each bucket of magnitudes the lowest place that occurs in it.
    - `steps`: bounds in one bucket, at most.
    """

    bounds: np.ndarray
    start: np.ndarray
    steps: int


@functools.lru_cache(maxsize=4)
def _search(code: Code) -> _Search:
    entries = _magnitudes(code).astype(np.float64)
    middle = (entries[:-1] + entries[1:]) / 2
    # Rounded down: a float32 is above the bound just when it is above the middle.
    bounds = middle.astype(np.float32)
    bounds = np.where(bounds > middle, np.nextafter(bounds, np.float32(0)), bounds)
    if not code.signed:
        bounds[0] = 0  # Whatever is positive stays positive.
    edges = ((np.arange(_BUCKETS, dtype=np.int32) + _FIRST_BUCKET) << _BUCKET_BITS).view(np.float32)
    edges[0] = 0
    start = np.searchsorted(bounds, edges, side="left").astype(np.int32)
    steps = int(np.max(np.append(start[1:], len(bounds)) - start))
    return _Search(np.append(bounds, np.float32(np.inf)), start, steps)
