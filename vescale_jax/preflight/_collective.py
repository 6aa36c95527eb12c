"""The collectives of a compiled program: what is sent, between whom, how often, and whether anything runs beside it.

In comes a `Program`, out go `Collective`s in the order in which they start. Bytes are those of the whole buffer: what
an all-gather makes, what a reduce-scatter or an all-reduce is given.
"""

import math
import re
from dataclasses import dataclass

import numpy as np

from ._text import Computation, Instruction, Program, leaves, nbytes

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "collective-broadcast")

_MESH = re.compile(r"mesh\[(.*?)\]\s*(\(.*?\))?\s*\{(.*?)\}")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective instruction.

    Attributes:

    - `name`: of the instruction that starts it.
    - `kind`: one of `KINDS`.
    - `dtype`: of the largest operand, as XLA names it.
    - `nbytes`: of the whole buffer.
    - `group`: the devices of the first group that exchange; all groups are of one size.
    - `is_async`: whether it is started and awaited by two instructions.
    - `computation`: the computation it stands in.
    - `turns`: how often it runs in one step.
    """

    name: str
    kind: str
    dtype: str
    nbytes: int
    group: tuple[int, ...]
    is_async: bool
    computation: str
    turns: int


def collectives(program: Program, num_devices: int) -> tuple[Collective, ...]:
    """The collectives of a program.

    Arguments:

    - `program`: what `read_program` returned.
    - `num_devices`: of all devices of the program, for collectives that name no groups.
    """
    found: list[Collective] = []
    for computation, turns in program.scheduled():
        started = (as_collective(program, computation, one, num_devices, turns) for one in computation.instructions)
        found += [collective for collective in started if collective]
    return tuple(found)


def as_collective(
    program: Program, computation: Computation, instruction: Instruction, num_devices: int, turns: int = 1
) -> Collective | None:
    """An instruction as a collective; None for one that is none, or that only waits for one."""
    wrapped, inside = instruction, computation
    if instruction.opcode in ("async-start", "fusion-start", "fusion") and (inner := program.called(instruction)):
        wrapped, inside = inner.root, inner
    kind = wrapped.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    group = replica_group(wrapped.attribute("replica_groups"), num_devices)
    if kind == "collective-permute":
        group = (0, 1)
    operands = [leaf for operand in inside.operands(wrapped) for leaf in leaves(operand.shape)]
    total = sum(leaf.nbytes for leaf in operands) or nbytes(wrapped.shape)
    dtype = max(operands, key=lambda leaf: leaf.nbytes).dtype if operands else leaves(wrapped.shape)[0].dtype
    return Collective(
        name=instruction.name,
        kind=kind,
        dtype=dtype,
        nbytes=total * (len(group) if kind == "all-gather" else 1),
        group=group,
        is_async=instruction.opcode.endswith("-start") and '"is_sync":true' not in instruction.rest,
        computation=computation.name,
        turns=turns,
    )


def replica_group(text: str, num_devices: int) -> tuple[int, ...]:
    """The first group of `replica_groups`, in any of the three ways in which XLA prints them."""
    if mesh := _MESH.search(text):
        sizes = {name: int(size) for name, size in re.findall(r"'?([^',=]+)'?\s*=\s*(\d+)", mesh[1])}
        mine = re.findall(r"'([^']+)'", mesh[3]) or [part.strip() for part in mesh[3].split(",") if part.strip()]
        if not set(mine) <= set(sizes):  # A part of an axis, such as 'fsdp':(1)4.
            parts = re.findall(r"(\d+)\s*\)\s*(\d+)", mesh[3])
            return tuple(range(math.prod(int(size) for _, size in parts) or num_devices))
        ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        others = [i for i, name in enumerate(sizes) if name not in mine]
        chosen = ids.transpose(*others, *[i for i in range(len(sizes)) if i not in others])
        return tuple(int(i) for i in chosen.reshape(-1, math.prod(sizes[name] for name in mine))[0])
    if iota := _IOTA.search(text):
        groups, dims = (tuple(int(n) for n in iota[i].split(",")) for i in (1, 2))
        ids = np.arange(math.prod(dims)).reshape(dims)
        if iota[3]:
            ids = ids.transpose(*(int(n) for n in iota[3].split(",")))
        return tuple(int(i) for i in ids.reshape(groups)[0].ravel())
    listed = re.search(r"\{\{([\d,\s]+)\}", text) or re.search(r"\{([\d,\s]+)\}", text)
    if listed:
        return tuple(int(n) for n in listed[1].split(","))
    return tuple(range(num_devices))
