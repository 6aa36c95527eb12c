"""Memory: the bytes of one device, by kind.

Comes in: an abstract (or real) training state, and the compiler's own account of the compiled step. Goes out: a
`Memory`. What is stored between steps is counted from shapes and shardings. What lives within a step is one number of
the compiler's, `temp`, of which gathered buffers are read from the schedule, gradients from the shapes of parameters,
and the rest is called activations: saved ones, workspaces, everything else.
"""

from dataclasses import dataclass
from typing import Any

import jax

from vescale_jax._groups import each_group
from vescale_jax._sharded import Sharded
from vescale_jax._train import TrainState

from ._gathered import gathered_bytes
from ._text import Program


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes that one device holds between steps.

    Attributes:

    - `parameters`: trainable and frozen shards, with their padding.
    - `gradients`: of the trainable shards, while they are there.
    - `optimizer_state`: shards of it, and what is replicated.
    - `rest`: of the model, replicated: statistics, keys, counters; and the step count.
    - `padding`: of all these, the part that belongs to no tensor.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    rest: int
    padding: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one device in a training step.

    Attributes:

    - `stored`: what a training state holds; None for a state that is not this library's.
    - `argument_bytes`, `output_bytes`, `alias_bytes`, `temp_bytes`, `code_bytes`: the compiler's account: arguments,
      results, results that take the memory of arguments, everything in between, and the program.
    - `gathered_bytes`: of gathered buffers, the most that are alive at once.
    - `device_bytes`: what the device has.
    """

    stored: Stored | None
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int
    gathered_bytes: int
    device_bytes: int

    @property
    def activation_bytes(self) -> int:
        """What of `temp_bytes` is neither gathered nor a gradient."""
        gradients = self.stored.gradients if self.stored else 0
        return max(0, self.temp_bytes - self.gathered_bytes - gradients)

    @property
    def total_bytes(self) -> int:
        """Everything a step needs at once."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes + self.code_bytes

    @property
    def fits(self) -> bool:
        """Whether the device has as much."""
        return self.total_bytes <= self.device_bytes


def memory_of(compiled: Any, program: Program, state: Any, device_bytes: int) -> Memory:
    """The bytes of one device in a compiled step.

    Arguments:

    - `compiled`: what `compile` returned.
    - `program`: its text, read.
    - `state`: the training state it was compiled for.
    - `device_bytes`: what the device has.
    """
    account = compiled.memory_analysis()
    return Memory(
        stored=stored_bytes(state) if isinstance(state, TrainState) else None,
        argument_bytes=account.argument_size_in_bytes,
        output_bytes=account.output_size_in_bytes,
        alias_bytes=account.alias_size_in_bytes,
        temp_bytes=account.temp_size_in_bytes,
        code_bytes=account.generated_code_size_in_bytes,
        gathered_bytes=gathered_bytes(program),
        device_bytes=device_bytes,
    )


def stored_bytes(state: TrainState) -> Stored:
    """What one device holds of a training state.

    Arguments:

    - `state`: abstract or not.
    """
    model: Sharded = state.model
    trainable = device_bytes(model.params)
    parameters = trainable + device_bytes(model.frozen)
    optimizer = device_bytes(state.opt_state)
    padding = 0
    for _, group in each_group(model.structure.units):
        layout = group.layout
        elements = layout.plan.padding * _layers(layout) // layout.plan.num_shards
        padding += elements * group.dtype.itemsize
    # An optimizer keeps a slot for every element of the trainable buffers, padding included.
    copies = optimizer / trainable if trainable else 0.0
    return Stored(
        parameters=parameters,
        gradients=trainable,
        optimizer_state=optimizer,
        rest=device_bytes((state.step, model.rest)),
        padding=round(padding * (1 + copies)),
    )


def device_bytes(tree: Any) -> int:
    """The bytes that one device holds of a tree of arrays or shapes with shardings."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            total += device_bytes(jax.eval_shape(jax.random.key_data, leaf))
            continue
        sharding = getattr(leaf, "sharding", None)
        shape = sharding.shard_shape(leaf.shape) if sharding is not None else leaf.shape
        size = leaf.dtype.itemsize
        for dim in shape:
            size *= dim
        total += size
    return total


def _layers(layout: Any) -> int:
    """Layers that share a plan: those of a stack, or one."""
    layers = 1
    for dim in getattr(layout, "stack", ()):
        layers *= dim
    return layers
