"""Parameter shapes of well-known models, as data for planning and for benchmarks.

In comes a name such as `"gpt-oss-120b"`; out go its units: the parameters that are gathered together, how often such a
unit occurs, and where the numbers are from. Shapes are (out, in), as the checkpoints have them; biases and norms are
included, buffers are not. Nothing here needs JAX.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Tensor = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class UnitShapes:
    """The parameters of one unit.

    Attributes:

    - `name`: such as `"layer"`.
    - `count`: how many units of the model have these shapes.
    - `tensors`: path within the unit and shape of each parameter, in model order.
    """

    name: str
    count: int
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """A model as its distinct units.

    Attributes:

    - `name`: as on the command line.
    - `source`: where the numbers are from.
    - `units`: distinct units in model order; `"layer"` is the one that occurs most.
    """

    name: str
    source: str
    units: tuple[UnitShapes, ...]

    def group(self, name: str) -> tuple[Tensor, ...]:
        """The tensors of a unit, or a part of the layer: `"experts"`, `"attention"`, `"mlp"`.

        Raises `ValueError` when the model has no such group; the message lists those it has.
        """
        groups = self.groups()
        if name not in groups:
            raise ValueError(f"{self.name}: got group {name!r}; want one of {', '.join(groups)}; choose one of these")
        return groups[name]

    def groups(self) -> dict[str, tuple[Tensor, ...]]:
        """Every group by name."""
        groups = {unit.name: unit.tensors for unit in self.units}
        for part, start in (("experts", "mlp/experts"), ("attention", "attention/"), ("mlp", "mlp/")):
            tensors = tuple(tensor for tensor in groups["layer"] if tensor[0].startswith(start))
            if tensors:
                groups[part] = tensors
        return groups


def _attention(hidden: int, heads: int, kv_heads: int, head_dim: int) -> list[Tensor]:
    """Grouped-query attention without biases."""
    return [
        ("attention/query", (heads * head_dim, hidden)),
        ("attention/key", (kv_heads * head_dim, hidden)),
        ("attention/value", (kv_heads * head_dim, hidden)),
        ("attention/output", (hidden, heads * head_dim)),
    ]


def _gated_mlp(path: str, hidden: int, width: int) -> list[Tensor]:
    """The three kernels of a gated MLP."""
    return [
        (f"{path}/gate", (width, hidden)),
        (f"{path}/up", (width, hidden)),
        (f"{path}/down", (hidden, width)),
    ]


def _norms(hidden: int) -> list[Tensor]:
    """The two norms of a layer."""
    return [("attention_norm", (hidden,)), ("mlp_norm", (hidden,))]


def _model(name: str, source: str, hidden: int, vocab: int, layers: list[UnitShapes]) -> ModelShapes:
    """A decoder with untied embedding and head around its layers."""
    embedding = UnitShapes("embedding", 1, (("embedding", (vocab, hidden)),))
    head = UnitShapes("head", 1, (("norm", (hidden,)), ("head", (vocab, hidden))))
    return ModelShapes(name, source, (embedding, *layers, head))


def _llama(name: str, source: str, hidden: int, width: int, heads: int, layers: int) -> ModelShapes:
    tensors = [
        *_attention(hidden, heads, 8, 128),
        *_gated_mlp("mlp", hidden, width),
        *_norms(hidden),
    ]
    return _model(name, source, hidden, 128256, [UnitShapes("layer", layers, tuple(tensors))])


def _gpt_oss(name: str, source: str, layers: int, experts: int) -> ModelShapes:
    """GPT-OSS keeps all experts of a layer in fused tensors, and has biases everywhere."""
    hidden = width = 2880
    attention: list[Tensor] = []
    for path, shape in _attention(hidden, 64, 8, 64):
        attention += [(path, shape), (f"{path}_bias", shape[:1])]
    tensors = [
        *attention,
        ("attention/sinks", (64,)),
        ("mlp/router", (experts, hidden)),
        ("mlp/router_bias", (experts,)),
        ("mlp/experts/gate_up", (experts, hidden, 2 * width)),
        ("mlp/experts/gate_up_bias", (experts, 2 * width)),
        ("mlp/experts/down", (experts, width, hidden)),
        ("mlp/experts/down_bias", (experts, hidden)),
        *_norms(hidden),
    ]
    return _model(name, source, hidden, 201088, [UnitShapes("layer", layers, tuple(tensors))])


def _deepseek_v3() -> ModelShapes:
    """Latent attention; three dense layers, then 58 with 256 routed experts and a shared one. Without the MTP layer."""
    hidden, heads, q_rank, kv_rank, nope, rope, value = 7168, 128, 1536, 512, 128, 64, 128
    attention: list[Tensor] = [
        ("attention/query_down", (q_rank, hidden)),
        ("attention/query_norm", (q_rank,)),
        ("attention/query_up", (heads * (nope + rope), q_rank)),
        ("attention/key_value_down", (kv_rank + rope, hidden)),
        ("attention/key_value_norm", (kv_rank,)),
        ("attention/key_value_up", (heads * (nope + value), kv_rank)),
        ("attention/output", (hidden, heads * value)),
    ]
    experts = [tensor for i in range(256) for tensor in _gated_mlp(f"mlp/experts/{i}", hidden, 2048)]
    routed = [
        *attention,
        ("mlp/router", (256, hidden)),
        ("mlp/router_bias", (256,)),
        *experts,
        *_gated_mlp("mlp/shared", hidden, 2048),
        *_norms(hidden),
    ]
    dense = [*attention, *_gated_mlp("mlp", hidden, 18432), *_norms(hidden)]
    return _model(
        "deepseek-v3",
        "https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json",
        hidden,
        129280,
        [UnitShapes("dense_layer", 3, tuple(dense)), UnitShapes("layer", 58, tuple(routed))],
    )


def _qwen3() -> ModelShapes:
    hidden = 4096
    tensors = [
        *_attention(hidden, 64, 4, 128),
        ("attention/query_norm", (128,)),
        ("attention/key_norm", (128,)),
        ("mlp/router", (128, hidden)),
        *(tensor for i in range(128) for tensor in _gated_mlp(f"mlp/experts/{i}", hidden, 1536)),
        *_norms(hidden),
    ]
    return _model(
        "qwen3-235b-a22b",
        "https://huggingface.co/Qwen/Qwen3-235B-A22B/blob/main/config.json",
        hidden,
        151936,
        [UnitShapes("layer", 94, tuple(tensors))],
    )


def _mixtral() -> ModelShapes:
    hidden = 4096
    tensors = [
        *_attention(hidden, 32, 8, 128),
        ("mlp/router", (8, hidden)),
        *(tensor for i in range(8) for tensor in _gated_mlp(f"mlp/experts/{i}", hidden, 14336)),
        *_norms(hidden),
    ]
    return _model(
        "mixtral-8x7b",
        "https://huggingface.co/mistralai/Mixtral-8x7B-v0.1/blob/main/config.json",
        hidden,
        32000,
        [UnitShapes("layer", 32, tuple(tensors))],
    )


_META = "https://huggingface.co/meta-llama/"
_OPENAI = "https://huggingface.co/openai/"

MODELS: Mapping[str, Callable[[], ModelShapes]] = {
    "llama-3-8b": lambda: _llama("llama-3-8b", f"{_META}Meta-Llama-3-8B", 4096, 14336, 32, 32),
    "llama-3-70b": lambda: _llama("llama-3-70b", f"{_META}Meta-Llama-3-70B", 8192, 28672, 64, 80),
    "llama-3-405b": lambda: _llama("llama-3-405b", f"{_META}Llama-3.1-405B", 16384, 53248, 128, 126),
    "gpt-oss-20b": lambda: _gpt_oss("gpt-oss-20b", f"{_OPENAI}gpt-oss-20b/blob/main/config.json", 24, 32),
    "gpt-oss-120b": lambda: _gpt_oss("gpt-oss-120b", f"{_OPENAI}gpt-oss-120b/blob/main/config.json", 36, 128),
    "deepseek-v3": _deepseek_v3,
    "qwen3-235b-a22b": _qwen3,
    "mixtral-8x7b": _mixtral,
}
"""The models by name; a call makes the shapes."""


def model_shapes(name: str) -> ModelShapes:
    """The shapes of a model.

    Raises `ValueError` for an unknown name; the message lists the known ones.
    """
    if name not in MODELS:
        raise ValueError(f"model: got {name!r}; want one of {', '.join(MODELS)}; choose one of these or use --module")
    return MODELS[name]()
