"""Model shapes: the totals that the models are known by, and the groups a user may name."""

import math

import pytest

from vescale_jax._model_shapes import MODELS, model_shapes


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3-405b", 405_853_388_800),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
        ("deepseek-v3", 671_026_419_200),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_parameters(name: str, parameters: int) -> None:
    model = model_shapes(name)
    assert sum(unit.count * math.prod(shape) for unit in model.units for _, shape in unit.tensors) == parameters
    assert model.source.startswith("https://")


@pytest.mark.parametrize("name", list(MODELS))
def test_groups(name: str) -> None:
    groups = model_shapes(name).groups()
    assert {"embedding", "layer", "head", "attention", "mlp"} <= set(groups)
    for tensors in groups.values():
        assert len({path for path, _ in tensors}) == len(tensors) > 0


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="model: got 'gpt-2'; want one of llama-3-8b, "):
        model_shapes("gpt-2")
    with pytest.raises(
        ValueError, match="llama-3-8b: got group 'experts'; want one of embedding, layer, head, attention"
    ):
        model_shapes("llama-3-8b").group("experts")
