"""Gathered buffers: how many bytes of them are alive at once.

In comes a `Program`; out goes the largest sum of the results of all-gathers that lie in memory together, by the
schedule: from the instruction that starts a gather to the last one that reads its result, through bitcasts, tuples and
loops.
"""

from collections.abc import Callable

from ._fusion import FREE
from ._text import Array, Computation, Instruction, Program, element_leaves, leaves, scheduled_calls

Origins = frozenset[str]
"""The gathers, and the leaves of a computation's parameter, that a leaf of a value lies in."""


def gathered_bytes(program: Program) -> int:
    """The most bytes of gathered buffers that are alive at once."""
    entry = program.computations[program.entry]
    return _Alive(program).peak(entry, [])


class _Alive:
    def __init__(self, program: Program) -> None:
        self.program = program

    def peak(self, computation: Computation, gathered: list[bool]) -> int:
        """The most bytes alive at once in a computation, of which some leaves of the parameters are gathered."""
        sizes, begins, ends, inner = self._lives(computation, gathered)
        most = 0
        for i, _ in enumerate(computation.instructions):
            here = [origin for origin, begin in begins.items() if begin <= i <= ends[origin]]
            below, taken = inner.get(i, (0, frozenset()))
            handed = {origin for origin in taken if ends[origin] <= i}
            most = max(most, below + sum(sizes[origin] for origin in here if origin not in handed))
        return most

    def _lives(
        self, computation: Computation, gathered: list[bool]
    ) -> tuple[dict[str, int], dict[str, int], dict[str, int], dict[int, tuple[int, Origins]]]:
        """Sizes, first and last positions of what is gathered, and the peaks of loops by position."""
        sizes: dict[str, int] = {}
        begins: dict[str, int] = {}
        ends: dict[str, int] = {}
        inner: dict[int, tuple[int, Origins]] = {}
        known: dict[str, list[Origins]] = {}

        def new(origin: str, size: int, position: int) -> Origins:
            sizes[origin], begins[origin], ends[origin] = size, position, position
            return frozenset([origin])

        for i, one in enumerate(computation.instructions):
            operands = [known[name] for name in one.operands] if one.opcode != "parameter" else []
            for origin in (origin for operand in operands for leaf in operand for origin in leaf):
                if one.opcode not in FREE or one.is_root:
                    ends[origin] = i
            mine = leaves(one.shape)
            if one.opcode == "parameter":
                marked = gathered if one.operands[0] == "0" else []
                marked = marked or [False] * len(mine)
                known[one.name] = [
                    new(f"{one.name}/{n}", leaf.nbytes, 0) if marked[n] else frozenset() for n, leaf in enumerate(mine)
                ]
            elif one.opcode in ("all-gather", "all-gather-start") or self._wraps_gather(one):
                # A start's type holds the operands too; the result is the second half.
                first = 0 if isinstance(one.shape, Array) else len(leaves(one.shape[0]))
                known[one.name] = [
                    new(f"{one.name}/{n}", leaf.nbytes, i) if n >= first and leaf.nbytes > 4 else frozenset()
                    for n, leaf in enumerate(mine)
                ]
            elif one.opcode in ("all-gather-done", "async-done"):
                known[one.name] = [origin for origin in operands[0] if origin][: len(mine)] or [frozenset()] * len(mine)
            elif one.opcode == "get-tuple-element":
                whole = computation.operands(one)[0].shape
                known[one.name] = [operands[0][n] for n in element_leaves(whole, one.numbers("index")[0])]
            elif one.opcode == "tuple":
                known[one.name] = [leaf for operand in operands for leaf in operand]
            elif one.opcode in FREE and operands:
                known[one.name] = operands[0][: len(mine)]
            elif one.opcode == "while":
                known[one.name] = self._loop(one, i, operands[0], inner, new)
            elif one.opcode == "call":
                below = self.peak(self.program.computations[scheduled_calls(one)[0]], [bool(o) for o in operands[0]])
                inner[i] = below, frozenset(origin for leaf in operands[0] for origin in leaf)
                known[one.name] = [frozenset()] * len(mine)
            else:
                known[one.name] = [frozenset()] * len(mine)
        return sizes, begins, ends, inner

    def _loop(
        self,
        loop: Instruction,
        position: int,
        state: list[Origins],
        inner: dict[int, tuple[int, Origins]],
        new: Callable[[str, int, int], Origins],
    ) -> list[Origins]:
        body = self.program.computations[loop.body]
        marked = [bool(leaf) for leaf in state]
        inner[position] = self.peak(body, marked), frozenset(origin for leaf in state for origin in leaf)
        # What comes out of the loop is what the last turn gathered: a buffer of its own.
        return [
            new(f"{loop.name}/{n}", leaf.nbytes, position + 1) if marked[n] else frozenset()
            for n, leaf in enumerate(leaves(loop.shape))
        ]

    def _wraps_gather(self, one: Instruction) -> bool:
        inner = self.program.called(one) if one.opcode == "async-start" else None
        return inner is not None and inner.root.opcode == "all-gather"
