"""A training step to be compiled for chips that are not there: a decoder of LLaMA's shape, in Flax nnx.

    python -m vescale_jax preflight --module examples.preflight_model:llama --chip h100 --topology 1x1x8 --set layers=4

`llama` takes a mesh and sizes, and returns the step, and its state and batch as shapes. The defaults are those of
LLaMA-3-8B (Grattafiori et al. 2024, arXiv 2407.21783, table 3), one row of 4096 tokens a device, AdamW in float32,
parameters gathered and gradients summed in bfloat16. Positions are left out: rotary embeddings cost no memory and next
to no time.

Shapes: B rows, T tokens, D width, H heads and G of keys and values, K = D / H, F width of the MLP, V vocabulary.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

import vescale_jax as vs
from vescale_jax.preflight import Workload


def linear(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    # A Flax module computes in the dtype its parameters were declared with, unless told otherwise: here float32, and
    # the gathered bfloat16 weights would be cast back, one copy of each.
    return nnx.Linear(inputs, outputs, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)


class Layer(nnx.Module):
    """Attention and a gated MLP, each added to its input: (B, T, D) -> (B, T, D)."""

    def __init__(self, width: int, heads: int, kv_heads: int, mlp_width: int, rngs: nnx.Rngs):
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, width // heads
        self.attention_norm = nnx.RMSNorm(width, dtype=jnp.bfloat16, rngs=rngs)
        self.query = linear(width, width, rngs)
        self.key = linear(width, kv_heads * self.head_width, rngs)
        self.value = linear(width, kv_heads * self.head_width, rngs)
        self.out = linear(width, width, rngs)
        self.mlp_norm = nnx.RMSNorm(width, dtype=jnp.bfloat16, rngs=rngs)
        self.gate = linear(width, mlp_width, rngs)
        self.up = linear(width, mlp_width, rngs)
        self.down = linear(mlp_width, width, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        rows, length, _ = x.shape
        h = self.attention_norm(x)
        query = self.query(h).reshape(rows, length, self.heads, self.head_width)
        key = self.key(h).reshape(rows, length, self.kv_heads, self.head_width)
        value = self.value(h).reshape(rows, length, self.kv_heads, self.head_width)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.reshape(x.shape))
        h = self.mlp_norm(x)
        return x + self.down(jax.nn.silu(self.gate(h)) * self.up(h))


class Llama(nnx.Module):
    """Tokens (B, T) -> logits (B, T, V)."""

    def __init__(self, layers: int, width: int, vocabulary: int, remat: bool, rngs: nnx.Rngs, **sizes: int):
        self.embedding = nnx.Embed(vocabulary, width, dtype=jnp.bfloat16, rngs=rngs)
        self.layers = nnx.List([Layer(width, rngs=rngs, **sizes) for _ in range(layers)])
        self.norm = nnx.RMSNorm(width, dtype=jnp.bfloat16, rngs=rngs)
        self.head = linear(width, vocabulary, rngs)
        self.remat = remat

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embedding(tokens)
        run = nnx.remat(lambda layer, x: layer(x)) if self.remat else lambda layer, x: layer(x)
        for layer in self.layers:
            x = run(layer, x)
        return self.head(self.norm(x))


def loss_fn(model: Llama, batch: dict[str, jax.Array]) -> jax.Array:
    logits = model(batch["tokens"][:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


def llama(
    mesh: Mesh,
    layers: int = 32,
    width: int = 4096,
    heads: int = 32,
    kv_heads: int = 8,
    mlp_width: int = 14336,
    vocabulary: int = 128256,
    length: int = 4096,
    rows: int = 1,
    remat: bool = True,
) -> Workload:
    """The workload: `rows` of `length` tokens a device; `remat` keeps of each layer its input alone."""

    def build() -> Llama:
        sizes = {"heads": heads, "kv_heads": kv_heads, "mlp_width": mlp_width}
        return Llama(layers, width, vocabulary, remat, nnx.Rngs(0), **sizes)

    policy = vs.MixedPrecisionPolicy(gather_dtype=jnp.bfloat16, reduce_dtype=jnp.bfloat16)
    model = vs.fully_shard(build, mesh, policy=policy, abstract=True)
    tx = optax.adamw(3e-4)
    batch = {"tokens": jax.ShapeDtypeStruct((rows * mesh.shape["fsdp"], length + 1), jnp.int32)}
    return Workload(
        step=vs.train_step(loss_fn, tx, max_norm=1.0),
        state=vs.train_state(model, tx),
        batch=batch,
        tokens=rows * mesh.shape["fsdp"] * length,
        flops_per_token=6.0 * layers * width * length,
    )
