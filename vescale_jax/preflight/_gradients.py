"""Copies of gradients: writes of packed gradients beyond the first.

In comes a `Program`; out go the bytes. From the operand of every reduce-scatter (and of an all-reduce that stands for
one) the kernels are followed backwards as long as they only move elements: a copy, a concatenate, a transpose, a cast.
What they write beyond one packed buffer is copied. The kernel that computes a gradient ends the way.
"""

from ._collective import Collective
from ._fusion import Kernels
from ._text import Computation, Instruction, Program, element_leaves, scheduled_calls

_THROUGH = frozenset(["bitcast", "optimization-barrier", "copy-done", "async-done", "add-dependency", "reshape"])


def gradient_copy_bytes(program: Program, kernels: Kernels, found: tuple[Collective, ...]) -> int:
    """Bytes of gradients that are written again before they are sent, in one step.

    Arguments:

    - `program`: what `read_program` returned.
    - `kernels`: facts about its kernels.
    - `found`: its collectives.
    """
    callers = _callers(program)
    total = 0
    for collective in found:
        if collective.kind != "reduce-scatter":
            continue
        computation = program.computations[collective.computation]
        start = computation.by_name[collective.name]
        written = sum(
            _written(program, kernels, callers, computation, operand) for operand in computation.operands(start)
        )
        total += max(0, written - collective.nbytes) * collective.turns
    return total


Callers = dict[str, list[tuple[Computation, Instruction]]]


def _callers(program: Program) -> Callers:
    """The loops and calls that run each scheduled computation."""
    callers: Callers = {}
    for computation, _ in program.scheduled():
        for instruction in computation.instructions:
            for name in scheduled_calls(instruction):
                callers.setdefault(name, []).append((computation, instruction))
    return callers


def _written(program: Program, kernels: Kernels, callers: Callers, computation: Computation, value: Instruction) -> int:
    """Bytes written by the kernels that only move what becomes a value: of what a loop carries, on the longest way."""
    on_the_way: set[tuple[str, str, int]] = set()

    def follow(where: Computation, one: Instruction, leaf: int) -> int:
        key = (where.name, one.name, leaf)
        if key in on_the_way:
            return 0
        on_the_way.add(key)
        total = behind(where, one, leaf)
        on_the_way.discard(key)
        return total

    def behind(where: Computation, one: Instruction, leaf: int) -> int:
        operands = where.operands(one)
        if one.opcode == "get-tuple-element":
            return follow(where, operands[0], element_leaves(operands[0].shape, one.numbers("index")[0])[leaf])
        if one.opcode == "tuple":
            chosen = [(i, element_leaves(one.shape, i)) for i in range(len(operands))]
            return sum(follow(where, operands[i], leaf - own[0]) for i, own in chosen if leaf in own)
        if one.opcode in _THROUGH:
            return follow(where, operands[0], leaf)
        if one.opcode == "parameter":
            return max((follow(*before) for before in _before(program, callers, where, one, leaf)), default=0)
        if called := scheduled_calls(one):
            bodies = [program.computations[name] for name in called]
            return max(follow(body, body.root, leaf) for body in bodies)
        made = () if kernels.is_product(one) else kernels.leaves(where, one)
        if leaf < len(made) and made[leaf].is_copy:
            return made[leaf].written + sum(follow(where, operands[i], 0) for i in made[leaf].operands)
        return 0

    return follow(computation, value, 0)


def _before(
    program: Program, callers: Callers, where: Computation, parameter: Instruction, leaf: int
) -> list[tuple[Computation, Instruction, int]]:
    """What a parameter of a loop body or of a called computation was given: in a loop, by the turn before as well."""
    number = int(parameter.operands[0])
    found: list[tuple[Computation, Instruction, int]] = []
    for caller, instruction in callers.get(where.name, ()):
        operands = caller.operands(instruction)
        if instruction.opcode == "while":
            found += [(where, where.root, leaf)]
            number = 0
        elif instruction.opcode == "conditional":
            number = 1 + instruction.calls.index(where.name)
        found += [(caller, operands[number], leaf)]
    return found
