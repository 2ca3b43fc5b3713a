"""The structures behind what issue 21 found in others' models, without their libraries."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from outside_harness import Case, assert_same_everywhere
from torch import nn

D = 64


class Blocks(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D)) for _ in range(depth))

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class AttentionPool(nn.Module):
    """CLIP's AttentionPool2d: one function is given the weights of four linears, none of which is called."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.c_proj = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(0, 1)
        pooled, _ = F.multi_head_attention_forward(
            query=x[:1], key=x, value=x, embed_dim_to_check=D, num_heads=4, in_proj_weight=None,
            in_proj_bias=torch.cat([self.q_proj.bias, self.k_proj.bias, self.v_proj.bias]), bias_k=None, bias_v=None,
            add_zero_attn=False, dropout_p=0.0, out_proj_weight=self.c_proj.weight, out_proj_bias=self.c_proj.bias,
            use_separate_proj_weight=True, q_proj_weight=self.q_proj.weight, k_proj_weight=self.k_proj.weight,
            v_proj_weight=self.v_proj.weight, training=self.training, need_weights=False,
        )  # fmt: skip
        return pooled[0]


class Pooled(Blocks):
    """A tower with a pooling head, as in CLIP's ResNets and HunyuanDiT."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = AttentionPool()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool(self.through(x))


class KeepsTokens(Blocks):
    """As DeiT, PriorTransformer and AutoencoderRAE: views of parameters stay in locals while the blocks run."""

    def __init__(self) -> None:
        super().__init__()
        self.cls = nn.Parameter(torch.randn(1, 1, D))
        self.place = nn.Parameter(torch.randn(1, 65, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        to_cat = [self.cls.expand(len(x), -1, -1)]
        place = self.place.to(x.dtype)  # the same dtype: the parameter itself
        x = self.through(torch.cat([*to_cat, x], dim=1) + place)
        return x + place + to_cat[0]


class KeepsSmallTokens(Blocks):
    """As transformers' DeiT: two tiny views are kept while a small weight is needed, and the largest weight is not."""

    def __init__(self) -> None:
        super().__init__()
        self.cls, self.distilled = nn.Parameter(torch.randn(1, 1, D)), nn.Parameter(torch.randn(1, 1, D))
        self.place = nn.Parameter(torch.randn(1, 8, D))
        self.patch = nn.Linear(D, D * 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.through(self.embed(self.patch(x)[..., :D]))

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        cls, distilled = self.cls.expand(len(x), -1, -1), self.distilled.expand(len(x), -1, -1)
        return torch.cat([cls, distilled, x], dim=1) + self.place


class SavedViews(nn.Module):
    """As the mixers of Nemotron-H and LFM2: an operator takes a view of a weight, and its autograd node saves it."""

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(D))
            self.conv = nn.Conv1d(D, D, 3, groups=D, bias=False)
            self.enter, self.leave = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.enter(x) * self.scale[None, None]
            x = x.transpose(1, 2)
            y = F.conv1d(x, self.conv.weight.squeeze(1).unsqueeze(1), padding=2, groups=D)[..., : x.shape[2]]
            return self.leave(y.transpose(1, 2))

    def __init__(self) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(self.Mixer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for mixer in self.mixers:
            x = x + mixer(x)
        return x


class NormedTable(Blocks):
    """As SEW-D: the largest weight is the input of another unit's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(256, D), nn.LayerNorm(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.norm(self.table.weight)
        return self.through(x) @ table.t() @ table / 256


class Wide(nn.Module):
    """Blocks of two linears: with adapters beside them they are carved by block, by layer, or as the budget asks."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.two(torch.relu(self.one(x)))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class TargetNetwork(Blocks):
    """As BYOL: the parent changes a child's weights under no_grad before each call of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            with torch.no_grad():
                block[1].weight.mul_(0.5)
                block[1].bias.add_(0.01)
            x = x + block(x)
        return x


class WeightTwice(nn.Module):
    """As AutoencoderKLMagvit: a weight is used twice a run, in a block that runs twice."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(D, D) / 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(torch.tanh(x @ self.weight) @ self.weight)

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(self.Part() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(part(x))
        return x


class Padded(nn.Module):
    """torch's encoder on a padded batch: in inference it packs the batch into a nested tensor."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, 4, 2 * D, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[1, 3:] = True
        return self.encoder(x, src_key_padding_mask=padding)


ALL = ("infer", "frozen", "lora", "full")


def case(name: str, kind: type[nn.Module], tokens: int = 6, modes: tuple[str, ...] = ALL) -> Case:
    return Case(name, kind, lambda: (torch.randn(2, tokens, D),), modes)


CASES = [
    case("attention pool", Pooled),
    case("kept tokens", KeepsTokens, 64),
    case("kept small tokens", KeepsSmallTokens),
    case("saved views", SavedViews),
    case("normed table", NormedTable),
    case("target network", TargetNetwork, modes=("infer", "frozen", "full")),
    case("padded batch", Padded, modes=("infer", "frozen", "full")),
    case("weight twice", WeightTwice, modes=("infer", "frozen", "full")),
]


@pytest.mark.parametrize("granularity", ["block", "phase", "layer"])
def test_the_least_budget_with_adapters_is_that_of_the_carving_which_is_used(granularity):
    """A budget below the adapters' own bytes must not be answered with the least of another carving."""
    adapted = dataclasses.replace(case("adapted", Wide, modes=("lora",)), granularity=granularity)
    assert_same_everywhere(adapted, budgets=("least",))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_stand_ins(case):
    assert_same_everywhere(case)
