"""Buffers that no checkpoint holds get the values that building the module off `meta` gives them."""

from __future__ import annotations

import pytest
import torch
from carom.core.checkpoint.computed_buffers import compute_buffers
from carom.core.common.errors import WeightsError
from torch import nn


def build(name: str):
    import transformers

    small = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 40,
    }
    if name == "llama3":
        config = transformers.LlamaConfig(
            **small, max_position_embeddings=64,
            rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
        )  # fmt: skip
        return lambda: transformers.LlamaForCausalLM(config)
    if name == "gemma3":
        config = transformers.Gemma3TextConfig(
            **small, num_key_value_heads=1, head_dim=16, layer_types=["sliding_attention", "full_attention"]
        )
        return lambda: transformers.Gemma3ForCausalLM(config)
    cls = {"bert": "Bert", "qwen2": "Qwen2", "gpt2": "GPT2"}[name]
    config = getattr(transformers, f"{cls}Config")(
        **({"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 40} if name == "gpt2" else small)
    )
    return lambda: getattr(transformers, f"{cls}Model")(config)


@pytest.mark.parametrize("name", ["llama3", "gemma3", "bert", "qwen2"])
def test_values_are_those_of_a_module_built_on_the_cpu(name: str):
    make = build(name)
    true = make()
    volatile = [n for n, _ in true.named_buffers() if n not in true.state_dict()]
    assert volatile
    with torch.device("meta"):
        module = make()
    state = torch.get_rng_state()
    values = compute_buffers(module, volatile)
    assert torch.equal(torch.get_rng_state(), state)
    assert values.keys() == set(volatile)
    for key, value in values.items():
        wanted = true.get_buffer(key)
        assert value.dtype == wanted.dtype and torch.equal(value, wanted), key
    assert all(t.device.type == "meta" for t in (*module.parameters(), *module.buffers()))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0), persistent=False)


class Half(Plain):
    def _init_weights(self, owner: nn.Module) -> None:
        owner.table[:2] = 1.0


class Failing(Plain):
    def _init_weights(self, owner: nn.Module) -> None:
        raise RuntimeError("no")


class Trained(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, device="cpu"))

    def _init_weights(self, owner: nn.Module) -> None:
        owner.table.fill_(1)
        owner.weight.data.zero_()


@pytest.mark.parametrize("cls", [Plain, Half, Failing, Trained])
def test_what_is_not_wholly_computed_is_named_with_the_remedy(cls: type):
    with torch.device("meta"):
        module = nn.Sequential(cls())
    with pytest.raises(WeightsError, match=r"'0.table'.*include_buffers=False"):
        compute_buffers(module, ["0.table"])
    assert module[0].table.device.type == "meta"
    if cls is Trained:
        assert torch.equal(module[0].weight.detach(), torch.ones(3))
