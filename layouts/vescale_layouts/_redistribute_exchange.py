"""Exchange: runs moved between devices, by one all_to_all where that wastes little.

Comes in: the runs, on the host. Goes out: a function of what each device holds, called inside `jax.shard_map`. A device
takes what it sends out of its elements by one gather, one collective carries it, and a second gather puts everything in
place. What differs between devices are the tables of both gathers, a row a run. What stays on its device does not
travel.

Three ways to carry it:

- *all_to_all*: what goes from one device to another is padded to the largest such part. Balanced moves take it.
- *ragged_all_to_all*: exact, in one operation, on GPUs and TPUs.
- *rounds*: exact but for the padding within a round: `ppermute`s, in each of which every device sends to one other at
  most. For unbalanced moves where there is no ragged_all_to_all.

Shapes: B batches; X elements before and Y afterwards on each device, in units of c elements that are never parted.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._redistribute_runs import Runs

Transport = Literal["none", "all_to_all", "ragged_all_to_all", "rounds"]
"""What carries the elements."""

# What of a round at least is no padding.
_FULL = 0.8

_RAGGED_PLATFORMS = ("gpu", "cuda", "rocm", "tpu")


@dataclass(frozen=True, slots=True)
class Round:
    """One `ppermute`.

    Attributes:

    - `pairs`: (from, to); no device is twice in either place.
    - `offset`, `size`: of its part of the sent elements, in units.
    """

    pairs: tuple[tuple[int, int], ...]
    offset: int
    size: int


@dataclass(frozen=True, eq=False)
class Exchange:
    """A move, ready to be done; made by `exchange_of`. Counts in units.

    Attributes:

    - `runs`: what is moved.
    - `transport`: how.
    - `unit`: elements that are never parted, c.
    - `send_size`, `received_size`: of the arrays that are sent and received.
    - `send`, `place`: int32 `(N, K, 3)`: for each device runs of what it sends, and of what it holds afterwards: first
      place, where that comes from, step there. Behind the last run, and in gaps, nothing comes from anywhere.
    - `rounds`: of that transport.
    - `parts`: int64 `(N, N)`: what goes from each device to each other.
    """

    runs: Runs
    transport: Transport
    unit: int
    send_size: int
    received_size: int
    send: np.ndarray
    place: np.ndarray
    rounds: tuple[Round, ...]
    parts: np.ndarray

    @property
    def wire_elements(self) -> int:
        """Elements that leave a device, over all devices, with padding."""
        shards = self.runs.num_shards
        if self.transport == "all_to_all":
            return (shards - 1) * self.send_size * self.unit
        if self.transport == "rounds":
            return sum(len(each.pairs) * each.size for each in self.rounds) * self.unit
        return int(self.parts.sum()) * self.unit

    def __call__(self, x: jax.Array, axis: str) -> jax.Array:
        """Moves the elements.

        Arguments:

        - `x`: what this device holds, `(X,)` or `(B, X)`.
        - `axis`: the mesh axis, manual in the surrounding `shard_map`.

        Returns: what it holds afterwards, `(Y,)` or `(B, Y)`; zero where nothing was moved to.
        """
        batch, unit = x.shape[:-1], self.unit
        runs = self.runs
        if not runs.target_size or not runs.source_size:
            return jnp.zeros((*batch, runs.target_size), x.dtype)
        x = x.reshape(-1, runs.source_size // unit, unit)
        device = lax.axis_index(axis)
        if self.transport != "none":
            sent = _take(x, jnp.asarray(self.send)[device], self.send_size)
            x = jnp.concatenate([self._carry(sent, axis, device), x], axis=1)
        x = _take(x, jnp.asarray(self.place)[device], runs.target_size // unit)
        return x.reshape(*batch, runs.target_size)

    def _carry(self, sent: jax.Array, axis: str, device: jax.Array) -> jax.Array:
        """What is sent, (B, sent, c), to what is received, (B, received, c)."""
        if self.transport == "all_to_all":
            return lax.all_to_all(sent, axis, 1, 1, tiled=True)
        if self.transport == "rounds":
            parts = [
                lax.ppermute(sent[:, each.offset : each.offset + each.size], axis, each.pairs) for each in self.rounds
            ]
            return jnp.concatenate(parts, axis=1)
        sizes, first = self.parts, np.cumsum(self.parts, 1) - self.parts
        landing = np.cumsum(self.parts, 0) - self.parts
        rows = (jnp.asarray(table.astype(np.int32))[device] for table in (first, sizes, landing, sizes.T))
        received = jnp.zeros((self.received_size, sent.shape[0], self.unit), sent.dtype)
        return lax.ragged_all_to_all(sent.swapaxes(0, 1), received, *rows, axis_name=axis).swapaxes(0, 1)


def exchange_of(runs: Runs, platform: str = "cpu", *, slack: float = 2.0) -> Exchange:
    """Prepares a move.

    Arguments:

    - `runs`: what is moved.
    - `platform`: of the devices, such as `"cpu"` or `"gpu"`; says whether there is a ragged_all_to_all.
    - `slack`: how many times the exact bytes a padded all_to_all may carry, to be preferred over the exact ways.

    Raises: `ValueError` where positions on a device do not fit into int32.
    """
    if max(runs.source_size, runs.target_size) + runs.source_size >= 2**31:
        got = f"{runs.source_size:,} and {runs.target_size:,} elements a device"
        raise ValueError(f"redistribute: got {got}; want below 2**30; move the tensors in several groups")
    unit = _unit(runs)
    scale = np.array([1, unit, 1, 1, unit, unit])
    order = np.lexsort((runs.table[:, 4], runs.table[:, 3], runs.table[:, 0]))
    table = runs.table[order] // scale
    n = runs.num_shards
    source, to, length = table[:, 0], table[:, 3], table[:, 5]
    pair = source * n + to
    # Where a run starts within what goes from one device to another.
    total = np.cumsum(length) - length
    first = np.searchsorted(pair, pair)
    within = total - total[first] if len(table) else total
    parts = (
        np.bincount(pair, length, n * n).astype(np.int64).reshape(n, n) if len(table) else np.zeros((n, n), np.int64)
    )
    np.fill_diagonal(parts, 0)
    transport, rounds = _choose(parts, platform, slack)
    if transport == "all_to_all":
        most = int(parts.max())
        send_size = received_size = n * most
        send_at = np.tile(np.arange(n, dtype=np.int64) * most, (n, 1))
        receive_at = send_at.T
    elif transport == "rounds":
        send_size = received_size = rounds[-1].offset + rounds[-1].size
        send_at = np.zeros((n, n), np.int64)
        for each in rounds:
            send_at[tuple(np.array(each.pairs).T)] = each.offset
        receive_at = send_at
    else:
        send_size, received_size = int(parts.sum(1).max()), int(parts.sum(0).max())
        send_at, receive_at = np.cumsum(parts, 1) - parts, np.cumsum(parts, 0) - parts
    travels = source != to
    out = table[travels]
    send = np.stack([send_at[out[:, 0], out[:, 3]] + within[travels], out[:, 1], out[:, 2]], 1)
    # Received elements lie before those that the device had.
    base = received_size if transport != "none" else 0
    came = np.where(travels, receive_at[source, to] + within, base + table[:, 1])
    place = np.stack([table[:, 4], came, np.where(travels, 1, table[:, 2])], 1)
    return Exchange(
        runs,
        transport,
        unit,
        send_size,
        received_size,
        _table(n, out[:, 0], send, out[:, 5], send_size, runs.source_size // unit),
        _table(n, to, place, length, runs.target_size // unit, base + runs.source_size // unit),
        rounds,
        parts,
    )


def _unit(runs: Runs) -> int:
    """The largest number of elements that no run, gap or shard parts."""
    table = runs.table
    if np.any(table[:, 2] != 1):
        return 1
    numbers = np.concatenate([table[:, 1], table[:, 4], table[:, 5], [runs.source_size, runs.target_size]])
    return max(int(np.gcd.reduce(numbers)), 1)


def _choose(parts: np.ndarray, platform: str, slack: float) -> tuple[Transport, tuple[Round, ...]]:
    n, exact = len(parts), int(parts.sum())
    if not exact:
        return "none", ()
    if n * (n - 1) * int(parts.max()) <= slack * exact:
        return "all_to_all", ()
    if platform in _RAGGED_PLATFORMS:
        return "ragged_all_to_all", ()
    # The largest first, each in the first round that has room for it and little more than its size.
    rounds: list[tuple[set[int], set[int], list[tuple[int, int]]]] = []
    for flat in np.argsort(-parts, axis=None, kind="stable")[: np.count_nonzero(parts)]:
        source, to = divmod(int(flat), n)
        for sources, targets, pairs in rounds:
            fits = parts[source, to] >= _FULL * parts[pairs[0]]
            if fits and source not in sources and to not in targets:
                break
        else:
            sources, targets, pairs = set[int](), set[int](), list[tuple[int, int]]()
            rounds.append((sources, targets, pairs))
        sources.add(source)
        targets.add(to)
        pairs.append((source, to))
    found: list[Round] = []
    for _, _, pairs in rounds:
        offset = found[-1].offset + found[-1].size if found else 0
        found.append(Round(tuple(pairs), offset, int(parts[pairs[0]])))
    return "rounds", tuple(found)


def _table(n: int, device: np.ndarray, rows: np.ndarray, length: np.ndarray, size: int, nowhere: int) -> np.ndarray:
    """Rows by device, ascending and without gaps: int32 (N, K, 3). Gaps come from `nowhere`, in steps of 0."""
    found: list[np.ndarray] = []
    for k in range(n):
        mine = device == k
        order = np.argsort(rows[mine, 0], kind="stable")
        own = rows[mine][order]
        starts = np.append(own[:, 0], size)
        ends = np.concatenate([[0], own[:, 0] + length[mine][order]])
        gaps = ends[ends < starts]
        filled = np.concatenate([own, np.stack([gaps, np.full_like(gaps, nowhere), np.zeros_like(gaps)], 1)])
        found.append(filled[np.argsort(filled[:, 0], kind="stable")])
    most = max(map(len, found))
    table = np.full((n, most, 3), (size, nowhere, 0), np.int32)
    for k, filled in enumerate(found):
        table[k, : len(filled)] = filled
    return table


def _take(x: jax.Array, table: jax.Array, size: int) -> jax.Array:
    """Elements in the order that a table of runs says: (B, X, c) -> (B, size, c)."""
    start, origin, step = table[:, 0], table[:, 1], table[:, 2]
    ones = jnp.ones_like(start)
    run = jnp.cumsum(jnp.zeros(size, jnp.int32).at[start].add(ones, mode="drop"), dtype=jnp.int32) - 1
    at = origin[run] + (jnp.arange(size, dtype=jnp.int32) - start[run]) * step[run]
    return x.at[:, at].get(mode="fill", fill_value=0)
