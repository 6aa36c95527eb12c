"""A compiled program, read from the text that XLA prints of it.

In comes scheduled HLO text, `compiled.as_text()`; out goes a `Program`: computations of instructions in the order in
which they run. Versions and backends print the same things differently: operands with or without their types, replica
groups as lists, as iota lists or by mesh axes, collectives as one instruction, as a start and a done, or wrapped in
`async-start`. What differs ends here; the other files see one form.
"""

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "s1": 1, "u1": 1}
"""Bits of an element where they are not the digits of the name."""

_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=\s]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-~$]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-~$]+) = ")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-~$]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_COMMENT = re.compile(r"/\*.*?\*/")


@dataclass(frozen=True, slots=True)
class Array:
    """The type of one array: `dtype` as XLA names it, such as `bf16`, and its dims."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """How many bytes they take."""
        return -(-self.elements * bits(self.dtype) // 8)


Shape = Array | tuple[Any, ...]
"""The type of a value: an array, or a tuple of types."""


def bits(dtype: str) -> int:
    """The bits of one element of an XLA dtype."""
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.match(r"[a-z]+(\d+)", dtype)  # f32, s8, f8e4m3fn, c64
    return int(digits[1]) if digits else 0


def leaves(shape: Shape) -> tuple[Array, ...]:
    """All arrays of a type, in order."""
    return (shape,) if isinstance(shape, Array) else tuple(leaf for part in shape for leaf in leaves(part))


def nbytes(shape: Shape) -> int:
    """The bytes of all arrays of a type."""
    return sum(leaf.nbytes for leaf in leaves(shape))


def element_leaves(shape: Shape, index: int) -> range:
    """Which leaves of a tuple belong to one of its elements."""
    if isinstance(shape, Array):
        return range(1)
    first = sum(len(leaves(part)) for part in shape[:index])
    return range(first, first + len(leaves(shape[index])))


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:

    - `name`, `opcode`: as printed, without the percent sign.
    - `shape`: the type of the result.
    - `operands`: names of instructions of the same computation.
    - `rest`: everything printed behind the operands.
    - `calls`: the computations it runs, such as that of a fusion or body and condition of a loop.
    - `is_root`: whether its result is the computation's.
    """

    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...]
    rest: str
    calls: tuple[str, ...]
    is_root: bool

    @property
    def op_name(self) -> str:
        """The JAX operations it stands for, empty for what XLA made of its own."""
        found = _OP_NAME.search(self.rest)
        return found[1] if found else ""

    @property
    def trips(self) -> int | None:
        """The turns of a loop, where XLA knows them."""
        found = _TRIPS.search(self.rest)
        return int(found[1]) if found else None

    @property
    def body(self) -> str:
        """The body of a loop."""
        return self.attribute("body").lstrip("%")

    @property
    def target(self) -> str:
        """What a custom call calls."""
        return self.attribute("custom_call_target").strip('"')

    def attribute(self, name: str) -> str:
        """The text of one attribute, up to the next; empty if there is none."""
        found = re.search(rf"(?:^|[ ,]){name}=", self.rest)
        if not found:
            return ""
        return self.rest[found.end() : _end(self.rest, found.end(), ",")].strip()

    def numbers(self, name: str) -> tuple[int, ...]:
        """The numbers of an attribute such as `dimensions={0,1}`."""
        return tuple(int(n) for n in re.findall(r"\d+", self.attribute(name)))


@dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they run; `by_name` finds them."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """The instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    @functools.cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """The parameters, in order of their numbers."""
        found = [i for i in self.instructions if i.opcode == "parameter"]
        return tuple(sorted(found, key=lambda i: int(i.operands[0])))

    def operands(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """The instructions that make an instruction's operands."""
        return tuple(self.by_name[name] for name in instruction.operands if name in self.by_name)


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:

    - `computations`: by name.
    - `entry`: the name of the one that runs first.
    """

    computations: dict[str, Computation]
    entry: str

    @functools.cached_property
    def turns(self) -> dict[str, int]:
        """How often each scheduled computation runs in one execution; a loop of unknown length counts once."""
        turns: dict[str, int] = {}

        def visit(name: str, times: int) -> None:
            turns[name] = turns.get(name, 0) + times
            for instruction in self.computations[name].instructions:
                for called in scheduled_calls(instruction):
                    visit(called, times * ((instruction.trips or 1) if instruction.opcode == "while" else 1))

        visit(self.entry, 1)
        return turns

    def scheduled(self) -> Iterator[tuple[Computation, int]]:
        """The computations whose instructions run as kernels, with how often each runs."""
        for name, times in self.turns.items():
            yield self.computations[name], times

    def called(self, instruction: Instruction) -> Computation | None:
        """The one computation that a fusion or an asynchronous wrapper runs."""
        return self.computations.get(instruction.calls[0]) if instruction.calls else None


def scheduled_calls(instruction: Instruction) -> tuple[str, ...]:
    """The computations that an instruction runs as a schedule of their own: loop bodies, branches, calls."""
    match instruction.opcode:
        case "while":
            return (instruction.body,)
        case "call" | "conditional":
            return instruction.calls
    return ()


def read_program(text: str) -> Program:
    """Reads a compiled program.

    Arguments:

    - `text`: scheduled HLO, from `compiled.as_text()`.

    Raises: `ValueError` if there is no entry computation in it.
    """
    computations: dict[str, Computation] = {}
    entry, name, found = "", "", list[Instruction]()
    for line in text.splitlines():
        if name:
            if line.startswith("}"):
                computations[name] = Computation(name, tuple(found))
                name = ""
            elif instruction := _instruction(line):
                found.append(instruction)
        elif header := _HEADER.match(line):
            name, found = header[2], []
            entry = name if header[1] else entry
    if entry not in computations:
        raise ValueError(
            f"read_program: got a text of {len(text)} characters without an ENTRY computation; want compiled HLO; pass "
            "compiled.as_text()"
        )
    return Program(computations, entry)


def _instruction(line: str) -> Instruction | None:
    """One line as an instruction; None for anything else."""
    head = _INSTRUCTION.match(line)
    if not head:
        return None
    start = head.end()
    end = _end(line, start, " ")
    shape = _shape(line[start:end])
    opcode, _, _ = line[end + 1 :].partition("(")
    opened = end + 1 + len(opcode)
    closed = _end(line, opened + 1, ")")
    inside, rest = line[opened + 1 : closed], line[closed + 1 :]
    calls = [*_CALLED.findall(rest)]
    if branches := _BRANCHES.search(rest):
        calls += [branch.strip().lstrip("%") for branch in branches[1].split(",")]
    operands = _operands(inside) if opcode != "constant" else ()
    return Instruction(head[2], opcode.strip(), shape, operands, rest, tuple(calls), bool(head[1]))


def _operands(inside: str) -> tuple[str, ...]:
    """Names of operands, whether or not their types are printed before them."""
    inside = _COMMENT.sub("", inside).strip()
    if "%" in inside:
        return tuple(re.findall(r"%([\w.\-~$]+)", inside))
    return tuple(part.strip().split(" ")[-1] for part in inside.split(",") if part.strip())


def _shape(text: str) -> Shape:
    """A type as printed."""
    text = _COMMENT.sub("", text).strip()
    if text.startswith("("):
        parts, start = [], 1
        while start < len(text) - 1:
            end = _end(text, start, ",")
            parts.append(_shape(text[start : min(end, len(text) - 1)]))
            start = end + 1
        return tuple(parts)
    found = _ARRAY.match(text)
    if not found:
        return Array("token", ())
    return Array(found[1], tuple(int(n) for n in re.findall(r"\d+", found[2])))


def _end(text: str, start: int, stop: str) -> int:
    """Where a character stands outside of brackets and quotes; the end of the text if nowhere."""
    depth, quoted = 0, False
    for i in range(start, len(text)):
        c = text[i]
        if quoted:
            quoted = c != '"' or text[i - 1] == "\\"
        elif c == stop and not depth:
            return i
        elif c == '"':
            quoted = True
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
    return len(text)
