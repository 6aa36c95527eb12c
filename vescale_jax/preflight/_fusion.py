"""What one kernel does: which of its results are mere copies, whether it multiplies, and how many bytes it moves.

In comes an instruction with the computation it stands in, out go facts about it alone. A fusion is judged by the
computation inside it, once for all fusions that share one.
"""

from dataclasses import dataclass, field

from ._text import Array, Computation, Instruction, Program, leaves, nbytes

FREE = frozenset(
    ["parameter", "constant", "bitcast", "tuple", "get-tuple-element", "optimization-barrier", "after-all",
     "partition-id", "replica-id", "add-dependency", "domain"]
)  # fmt: skip
"""Opcodes that are no kernel."""

_MOVES = frozenset(
    ["copy", "copy-start", "transpose", "concatenate", "slice", "dynamic-slice", "reshape", "reverse", "pad", "convert",
     "bitcast-convert", "dynamic-update-slice"]
)  # fmt: skip
"""Opcodes that put elements elsewhere, or in another dtype, and compute nothing."""

_SLICES = frozenset(["slice", "dynamic-slice", "gather"])

_PRODUCT_CALLS = ("matmul", "gemm", "cublas", "cudnn", "onednn")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a kernel's result.

    Attributes:

    - `is_copy`: whether its elements are those of some operands, moved.
    - `operands`: by number, those that its elements come from; of a copy, without indices.
    - `written`: bytes that are written.
    - `joined`: whether several operands or slices are put side by side.
    - `made_by_xla`: whether no JAX operation asked for that.
    """

    is_copy: bool
    operands: frozenset[int]
    written: int
    joined: bool = False
    made_by_xla: bool = False


@dataclass
class Kernels:
    """Facts about the kernels of a program, found once each."""

    program: Program
    _leaves: dict[str, tuple[Leaf, ...]] = field(default_factory=dict)
    _products: dict[str, bool] = field(default_factory=dict)
    _reads: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def is_product(self, instruction: Instruction) -> bool:
        """Whether an instruction multiplies matrices."""
        if instruction.opcode in ("dot", "ragged-dot", "convolution", "scaled-dot"):
            return True
        if instruction.opcode == "custom-call":
            return any(part in instruction.target.lower() for part in _PRODUCT_CALLS)
        if instruction.opcode != "fusion":
            return False
        name = instruction.calls[0]
        if name not in self._products:
            self._products[name] = any(map(self.is_product, self.program.computations[name].instructions))
        return self._products[name]

    def leaves(self, computation: Computation, instruction: Instruction) -> tuple[Leaf, ...]:
        """The arrays of an instruction's result."""
        if instruction.opcode == "fusion":
            name = instruction.calls[0]
            if name not in self._leaves:
                self._leaves[name] = self._fused_leaves(self.program.computations[name])
            return self._leaves[name]
        everything = frozenset(range(len(instruction.operands)))
        if instruction.opcode in _MOVES:
            moved = _moved(instruction)
            update = instruction.opcode == "dynamic-update-slice"
            size = nbytes(computation.operands(instruction)[1].shape) if update else leaves(instruction.shape)[0].nbytes
            joined = instruction.opcode == "concatenate"
            return (Leaf(True, moved, size, joined, joined and "concatenate" not in instruction.op_name),)
        return tuple(Leaf(False, everything, leaf.nbytes) for leaf in leaves(instruction.shape))

    def reads(self, computation: Computation, instruction: Instruction) -> tuple[int, ...]:
        """The bytes read of each operand: of one that is only sliced, those of the slices."""
        whole = tuple(nbytes(operand.shape) for operand in computation.operands(instruction))
        if instruction.opcode in _SLICES:
            return (min(whole[0], nbytes(instruction.shape)), *whole[1:])
        if instruction.opcode == "dynamic-update-slice":
            return (0, *whole[1:])
        if instruction.opcode != "fusion":
            return whole
        name = instruction.calls[0]
        if name not in self._reads:
            fused = self.program.computations[name]
            users: dict[str, list[Instruction]] = {}
            for user in fused.instructions:
                for operand in user.operands if user.opcode != "parameter" else ():
                    users.setdefault(operand, []).append(user)
            self._reads[name] = tuple(self._read(fused, parameter, users) for parameter in fused.parameters)
        return self._reads[name]

    def _read(self, fused: Computation, value: Instruction, users: dict[str, list[Instruction]]) -> int:
        total, whole = 0, nbytes(value.shape)
        for user in users.get(value.name, ()):
            if user.opcode in _SLICES and user.operands[0] == value.name:
                total += nbytes(user.shape)
            elif user.opcode == "bitcast":
                total += self._read(fused, user, users)
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
                continue  # Updated in place.
            elif user.opcode == "fusion":
                total += sum(
                    read
                    for operand, read in zip(user.operands, self.reads(fused, user), strict=False)
                    if operand == value.name
                )
            else:
                return whole
        return min(total, whole)

    def _fused_leaves(self, fused: Computation) -> tuple[Leaf, ...]:
        root = fused.root
        roots = fused.operands(root) if root.opcode == "tuple" else (root,)
        return tuple(leaf for one in roots for leaf in self._traced(fused, one))

    def _traced(self, fused: Computation, root: Instruction) -> tuple[Leaf, ...]:
        """Follows a result of a fusion back to the parameters."""
        is_copy, moves, sources, joins = True, False, set[int](), list[Instruction]()
        slices = 0
        stack, seen = [root], set[str]()
        numbers = {parameter.name: int(parameter.operands[0]) for parameter in fused.parameters}
        while stack:
            one = stack.pop()
            if one.name in seen:
                continue
            seen.add(one.name)
            operands = fused.operands(one) if one.opcode != "parameter" else ()
            if one.opcode == "parameter":
                sources.add(numbers[one.name])
            elif one.opcode in _MOVES:
                moves = True
                slices += one.opcode in _SLICES
                joins += [one] if one.opcode == "concatenate" else []
                kept = _moved(one)
                operands = tuple(operands[i] for i in sorted(kept))
            elif one.opcode == "broadcast" and operands and not leaves(operands[0].shape)[0].dims:
                operands = () if operands[0].opcode == "constant" else operands
            elif one.opcode not in FREE and not _is_index(one):
                is_copy = False
            stack += operands
        written = _written(fused, root)
        made = bool(joins) and not any("concatenate" in join.op_name for join in joins)
        joined = bool(joins) and (len(sources) > 1 or slices > 1)
        found = Leaf(is_copy and moves and bool(sources), frozenset(sources), written, joined, made)
        return tuple(Leaf(found.is_copy, found.operands, size, joined, made) for size in _sizes(root, written))


def _moved(instruction: Instruction) -> frozenset[int]:
    """The operands whose elements an instruction moves; the others are indices, or the padding's value."""
    match instruction.opcode:
        case "dynamic-slice" | "pad" | "copy" | "copy-start":
            return frozenset([0])
        case "dynamic-update-slice":
            return frozenset([1])
    return frozenset(range(len(instruction.operands)))


def _is_index(instruction: Instruction) -> bool:
    """Whether an instruction computes an index or a flag: a few integers."""
    shape = instruction.shape
    return isinstance(shape, Array) and shape.elements <= 8 and shape.dtype[0] in "sup"


def _written(fused: Computation, root: Instruction) -> int:
    """Bytes that a result of a fusion writes; an update in place writes the update."""
    while root.opcode == "bitcast":
        root = fused.operands(root)[0]
    if root.opcode == "dynamic-update-slice":
        return nbytes(fused.operands(root)[1].shape)
    return nbytes(root.shape)


def _sizes(root: Instruction, written: int) -> tuple[int, ...]:
    """The bytes of each array of a result of a fusion."""
    found = leaves(root.shape)
    return (written,) if len(found) == 1 else tuple(leaf.nbytes for leaf in found)
