"""Copies of weights: bytes that are written between an all-gather and the product that reads them.

In comes a `Program`; out go `WeightCopies`. Whatever lies in an all-gather's result is followed through bitcasts,
tuples, loops, calls and copies, never through arithmetic. A kernel that only moves such elements (a copy, a slice by
itself, a transpose, a cast) is a copy of weights if a product reads what it writes, or if a loop carries it. What a
product takes out of the gathered buffer by itself, as a fused slice does, is no copy.
"""

from dataclasses import dataclass

from ._fusion import Kernels
from ._text import Computation, Instruction, Program, element_leaves, leaves, scheduled_calls

Marks = frozenset[str]
"""What a value has come through: `_WEIGHT`, and the copies on its way, each as computation/instruction/leaf."""

_WEIGHT = ""

_THROUGH = frozenset(["bitcast", "optimization-barrier", "copy-done", "async-done", "add-dependency", "reshape"])


@dataclass(frozen=True, slots=True)
class Copy:
    """One kernel's copy of weights: where, and the bytes it writes in one step, over all turns of loops."""

    name: str
    computation: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class WeightCopies:
    """The copies of weights in a program.

    Attributes:

    - `copies`: those that a product or a loop reads.
    - `merged`: weights put side by side by XLA, for one product instead of several that share an operand.
    - `others`: moved weights that no product reads: gains of norms, biases.
    """

    copies: tuple[Copy, ...]
    merged: tuple[Copy, ...]
    others: tuple[Copy, ...]


def weight_copies(program: Program, kernels: Kernels) -> WeightCopies:
    """Finds the copies of weights in a program.

    Arguments:

    - `program`: what `read_program` returned.
    - `kernels`: facts about its kernels.
    """
    walk = _Walk(program, kernels)
    walk.visit(program.computations[program.entry], [])
    sorted_out: dict[str, list[Copy]] = {"copies": [], "merged": [], "others": []}
    for mark, (computation, instruction, leaf) in walk.copies.items():
        found = kernels.leaves(program.computations[computation], instruction)[leaf]
        copy = Copy(instruction.name, computation, found.written * program.turns[computation])
        read = mark in walk.read
        sorted_out["others" if not read else "merged" if found.joined and found.made_by_xla else "copies"].append(copy)
    return WeightCopies(*(tuple(sorted_out[kind]) for kind in ("copies", "merged", "others")))


class _Walk:
    """Follows marks through the scheduled computations, to a fixed point in loops."""

    def __init__(self, program: Program, kernels: Kernels) -> None:
        self.program, self.kernels = program, kernels
        self.copies: dict[str, tuple[str, Instruction, int]] = {}
        self.read: set[str] = set()

    def visit(self, computation: Computation, arguments: list[list[Marks]]) -> list[Marks]:
        """The marks of each leaf of the result, of those of each leaf of each parameter."""
        known: dict[str, list[Marks]] = {}
        for instruction in computation.instructions:
            if instruction.opcode == "parameter":
                number = int(instruction.operands[0])
                given = arguments[number] if number < len(arguments) else []
                known[instruction.name] = given or _none(instruction)
            else:
                known[instruction.name] = self._result(computation, instruction, known)
        return known[computation.root.name]

    def _result(self, computation: Computation, instruction: Instruction, known: dict[str, list[Marks]]) -> list[Marks]:
        operands = [known.get(name, [frozenset()]) for name in instruction.operands]
        opcode = instruction.opcode
        if opcode.removesuffix("-start").removesuffix("-done") == "all-gather":
            return [frozenset([_WEIGHT])] * len(leaves(instruction.shape))
        if opcode in ("async-start", "async-done") and self._gathers(computation, instruction):
            return [frozenset([_WEIGHT])] * len(leaves(instruction.shape))
        if opcode == "get-tuple-element":
            whole = computation.operands(instruction)[0].shape
            chosen = element_leaves(whole, instruction.numbers("index")[0])
            return [operands[0][i] for i in chosen]
        if opcode == "tuple":
            return [marks for operand in operands for marks in operand]
        if opcode in _THROUGH:
            return [*operands[0]][: len(leaves(instruction.shape))]
        if opcode == "while":
            return self._loop(instruction, operands[0])
        if called := scheduled_calls(instruction):
            # A call hands all operands to one computation; a conditional its operands but the first, one to each.
            given = [operands] if opcode == "call" else [[one] for one in operands[1:]]
            bodies = [self.program.computations[name] for name in called]
            results = [self.visit(body, arguments) for body, arguments in zip(bodies, given, strict=False)]
            return [frozenset().union(*marks) for marks in zip(*results, strict=True)]
        if self.kernels.is_product(instruction):
            self.read |= {mark for operand in operands for marks in operand for mark in marks}
            return _none(instruction)
        return self._kernel(computation, instruction, operands)

    def _loop(self, loop: Instruction, state: list[Marks]) -> list[Marks]:
        body = self.program.computations[loop.body]
        while True:
            after = self.visit(body, [state])
            joined = [a | b for a, b in zip(state, after, strict=True)]
            if joined == state:
                break
            state = joined
        # A copy that reaches the end of a turn was made for the loop's sake, whoever reads it.
        self.read |= {mark for marks in after for mark in marks if mark.startswith(body.name + "/")}
        return state

    def _kernel(self, computation: Computation, instruction: Instruction, operands: list[list[Marks]]) -> list[Marks]:
        """Marks of what a kernel moves; none of what it computes."""
        result: list[Marks] = []
        for i, leaf in enumerate(self.kernels.leaves(computation, instruction)):
            sources = frozenset[str]().union(
                *(marks for n in leaf.operands if n < len(operands) for marks in operands[n])
            )
            if not leaf.is_copy or _WEIGHT not in sources:
                result.append(frozenset())
                continue
            mark = f"{computation.name}/{instruction.name}/{i}"
            self.copies[mark] = (computation.name, instruction, i)
            result.append(sources | {mark})
        wanted = len(leaves(instruction.shape))
        return (result + [frozenset()] * wanted)[:wanted]

    def _gathers(self, computation: Computation, instruction: Instruction) -> bool:
        start = instruction if instruction.calls else computation.operands(instruction)[0]
        inner = self.program.called(start)
        return inner is not None and inner.root.opcode == "all-gather"


def _none(instruction: Instruction) -> list[Marks]:
    return [frozenset()] * len(leaves(instruction.shape))
