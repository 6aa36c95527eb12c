"""One small parameter on its way through the library, printed at every step.

    python examples/one_parameter.py

Three tensors, four shards: a 5 x 6 kernel in blocks of two rows, a bias and a scale. The order of the steps is that of
the table in the README, from the user's parameters to the optimizer's update.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

import vescale_jax as vs
from vescale_layouts import DBuffer, Layout, gather, reduce_scatter
from vescale_planner import Rows, TensorSpec, plan_group


def title(text: str) -> None:
    print(f"\n== {text}")


def loss_fn(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    return jnp.mean((batch @ params["kernel"] * params["scale"] + params["bias"]) ** 2)


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",))
    params = {"kernel": jnp.arange(30.0).reshape(5, 6) / 30, "bias": jnp.ones(6), "scale": jnp.ones(())}

    title("1. parameters of the user")
    print(params)

    title("2. specs: a shape and the block that is never cut")
    specs = [TensorSpec("kernel", (5, 6), Rows(2)), TensorSpec("bias", (6,)), TensorSpec("scale", ())]
    print(*specs, sep="\n")

    title("3. plan: order, slots and the shard size")
    plan = plan_group(specs, num_shards=4, alignment=4)
    print(plan)

    title("4. placements: which blocks lie on which device")
    layout = Layout(plan, mesh, "fsdp")
    for name, placement in layout.placements.items():
        print(name, placement)
    print("kernel[4, 5] lies at", layout.locate("kernel", (4, 5)))

    title("5. buffer: one flat array, cut evenly")
    buffer = DBuffer.from_tensors(layout, params, jnp.float32)
    print(buffer, buffer.data.sharding)
    for shard in buffer.data.addressable_shards:
        print(f"device {shard.index[0].start // layout.shard_size}:", np.round(np.asarray(shard.data), 2))

    title("6. gather and reduce-scatter: shards to tensors, gradients to shards")

    def there_and_back(shard: jax.Array) -> jax.Array:
        return reduce_scatter(layout, gather(layout, shard))

    cut = PartitionSpec("fsdp")
    summed = jax.shard_map(there_and_back, mesh=mesh, in_specs=cut, out_specs=cut)(buffer.data)
    print("each device gathers the kernel, and the sum of four is four times it:")
    print(np.array_equal(DBuffer(summed, layout).tensors()["kernel"], 4 * params["kernel"]))

    title("7. fully_shard does all of this")
    blocks = {"kernel": Rows(2), "bias": Rows(1)}
    model = vs.fully_shard(params, mesh, blocks=blocks)
    print(vs.describe(model))

    title("8. a training step: gradients and the optimizer's state are shards too")
    optimizer = optax.adamw(0.1)
    state = vs.train_state(model, optimizer)
    state, metrics = vs.train_step(loss_fn, optimizer)(state, jnp.ones((8, 5)))
    print(f"loss {metrics.loss:.4f}, gradient norm {metrics.grad_norm:.4f}")
    print("first moment:", state.opt_state[0].mu["root"]["float32"])
    print("kernel after the step:\n", vs.unshard(state.model)["kernel"])


if __name__ == "__main__":
    main()
