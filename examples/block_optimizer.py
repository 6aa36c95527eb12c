"""An optimizer of your own that works on blocks: gradient descent with one scale for every block.

    python examples/block_optimizer.py

Every block of 8 x 8 weights moves by its gradient over a running mean of the gradient magnitudes in the block, as in
an Adam that keeps a 64th of the state. `fully_shard` keeps the blocks whole, so a block view hands each device its own
ones as one dense array, and the optimizer needs no communication. The program trains the same model on eight devices
and on one, and compares.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import vescale_jax as vs
from vescale_layouts import BlockArrays, BlockView, DBuffer
from vescale_planner import Tile


def block_descent(learning_rate: float, decay: float = 0.9) -> optax.GradientTransformation:
    """The whole optimizer; its state is one number a block."""

    def init(params):
        return on_buffers(lambda p: BlockArrays.zeros(BlockView.of(p.layout), jnp.float32), params)

    def update(grads, state, params=None):
        del params
        pairs = on_buffers(one_group, grads, state)
        return tuple(on_buffers(lambda _, pair, i=i: pair[i], grads, pairs) for i in range(2))

    def one_group(grad, scales):
        def step(local, shard, scales):
            new, steps = [], []
            for blocks, exists, scale in zip(local.split(shard), local.masks(), scales, strict=True):
                mean = jnp.abs(blocks).sum((1, 2)) / jnp.maximum(exists.sum((1, 2)), 1)
                new.append(decay * scale + (1 - decay) * mean)
                steps.append(-learning_rate * blocks / (new[-1][:, None, None] + 1e-8))
            return local.join(steps), new

        shard, new = scales.view.map(step, grad.data, scales.data)
        return DBuffer(shard, grad.layout), BlockArrays(new, scales.view)

    # In a chain, masks and ratios beside it are then still checked by train_state.
    return optax.GradientTransformation(*vs.optimizers.steps_aside(init, update))


def on_buffers(function: Callable, *trees):
    """Calls a function for every group of a model: its buffer, and what other trees hold in the same place."""
    return jax.tree.map(function, *trees, is_leaf=lambda node: isinstance(node, DBuffer))


def loss_fn(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["up"] + params["bias"][None])
    return jnp.mean((hidden @ params["down"] - jnp.sin(3 * x[:, :9])) ** 2)


def train(devices: int, steps: int = 30) -> tuple[list[float], dict[str, jax.Array]]:
    """The losses of some steps on so many devices, and the parameters after them."""
    keys = jax.random.split(jax.random.key(0))
    params = {
        "up": jax.random.normal(keys[0], (20, 50)) / 5,
        "bias": jnp.zeros(50),
        "down": jax.random.normal(keys[1], (50, 9)) / 7,
    }
    mesh = Mesh(np.array(jax.devices()[:devices]), ("fsdp",))
    optimizer = block_descent(0.01)
    state = vs.train_state(vs.fully_shard(params, mesh, blocks=Tile(8, 8)), optimizer)
    step = vs.train_step(loss_fn, optimizer)
    x = np.random.default_rng(0).normal(size=(64, 20)).astype(np.float32)
    losses = []
    for _ in range(steps):
        state, metrics = step(state, x)
        losses.append(float(metrics.loss))
    return losses, vs.unshard(state.model)


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    eight, parameters = train(8)
    one, alone = train(1)
    for i in range(0, 30, 5):
        print(f"step {i:2}: loss {eight[i]:.6f} on eight devices, {one[i]:.6f} on one")
    apart = max(float(jnp.abs(parameters[name] - alone[name]).max()) for name in alone)
    print(f"largest difference of a parameter after 30 steps: {apart:.1e}")
    if apart > 1e-4:
        raise SystemExit("The two runs should agree.")


if __name__ == "__main__":
    main()
