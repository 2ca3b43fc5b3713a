"""Small seeded models for the tests: one for every kind of module tree that the engine must support.

Every case returns the same weights and inputs at each call. Blocks of a repeated list run through `Net.through`,
which checkpoints them as ``model.checkpoint`` says.
"""

# mypy: disable-error-code="union-attr,arg-type,operator,index"
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

D = 16  # width; small, so that the whole suite is


class Net(nn.Module):
    """The base class of the models. ``checkpoint``: "none", "non-reentrant" or "reentrant"."""

    checkpoint = "none"

    def through(self, block: Callable, *args: Any) -> Any:
        if self.checkpoint == "none" or not torch.is_grad_enabled():
            return block(*args)
        return checkpoint(block, *args, use_reentrant=self.checkpoint == "reentrant")


class Block(nn.Module):
    def __init__(self, d: int = D, wide: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, wide * d)
        self.down = nn.Linear(wide * d, d)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Chain(nn.Module):
    """Equal frozen layers and nothing else, so that bytes are easy to count."""

    def __init__(self, depth: int = 12, width: int = 32, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Stack(Net):
    """A linear stem, equal blocks and a linear head."""

    def __init__(self, depth: int = 6, d: int = D, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Linear(d, d)
        self.blocks = nn.ModuleList(Block(d, dropout=dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.through(block, x)
        return self.head(self.norm(x))


class Steered(Stack):
    """A stack whose blocks run in the order that ``route`` lists, which can skip, repeat or reverse blocks."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__(depth)
        self.route: list[int] = list(range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for index in self.route:
            x = self.through(self.blocks[index], x)
        return self.head(self.norm(x))


class Mixed(nn.Module):
    """A model whose blocks have weights of three dtypes and odd sizes."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.narrow = nn.Linear(D, wide, dtype=torch.bfloat16)
        self.broad = nn.Linear(wide, D, dtype=torch.float64)
        self.gain = nn.Parameter(torch.randn(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.narrow(x.to(torch.bfloat16)).to(torch.float64)
        return x + self.gain * torch.tanh(self.broad(y)).to(x.dtype)


class Heterogeneous(Net):
    """Two kinds of blocks in two lists, with different sizes and dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.double_blocks = nn.ModuleList(Mixed(w) for w in (13, 40, 7))
        self.single_blocks = nn.ModuleList(Block(D, wide=w) for w in (2, 5, 3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.double_blocks, *self.single_blocks):
            x = self.through(block, x)
        return x


class ConvBlock(nn.Module):
    def __init__(self, dimensions: int, c: int) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
        back = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dimensions - 1]
        self.down = conv(c, 2 * c, 3, stride=2, padding=1)
        self.mix = conv(2 * c, 2 * c, 3, padding=2, dilation=2, groups=2, padding_mode="circular")
        self.norm = nn.GroupNorm(2, 2 * c)
        self.up = back(2 * c, c, 4, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(F.silu(self.norm(self.mix(self.down(x)))))


class Convolutions(Net):
    def __init__(self, dimensions: int, channels_last: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ConvBlock(dimensions, 16 if dimensions == 1 else 4) for _ in range(4))
        if channels_last:
            self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.through(block, x)
        return x


class AttentionBlock(nn.Module):
    """A block with `nn.MultiheadAttention`, which uses the weight of its out_proj without calling out_proj."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.mlp = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.mlp(self.attention(y, y, y, need_weights=False)[0])


class Attention(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(AttentionBlock() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.through(layer, x)
        return x


class Encoder(Net):
    """torch's own encoder, with its fused path in inference."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, 2, 4 * D, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        for parameter in self.parameters():  # deep copies of one layer: make them differ
            nn.init.normal_(parameter, std=0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)


class Recurrent(Net):
    """A model with LSTMs, which keep their weights in a list in addition to ``_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(D, D, 2, batch_first=True) for _ in range(3))
        self.cell = nn.GRUCell(D, D)
        self.head = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)[0]
        state = torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return self.head(state)


class Tied(Net):
    """A model whose embedding and head share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, D)
        self.place = nn.Parameter(torch.randn(1, 6, D))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place
        for block in self.blocks:
            x = self.through(block, x)
        return self.head(self.norm(x))


class Experts(Net):
    """A model whose input decides which block runs, so that every pass has a different order."""

    def __init__(self) -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(D, 3) for _ in range(3))
        self.experts = nn.ModuleList(nn.ModuleList(Block() for _ in range(3)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for router, experts in zip(self.routers, self.experts, strict=True):
            choice = int(router(x.detach().mean(dim=(0, 1))).argmax())
            x = self.through(experts[choice], x)
        return x


class Nested(Net):
    """A model with lists in dicts in lists, numbered attributes, a Sequential, and a block that two places share."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleDict({"a": Block(), "b": nn.ModuleList([Block(wide=2), Block(wide=3)])})
            for _ in range(2)
        )
        self.down1, self.down2, self.down3 = Block(wide=1), Block(wide=2), Block(wide=3)
        self.tail = nn.Sequential(Block(), nn.ReLU(), Block())
        self.again = self.stages[0]["a"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = self.through(stage["a"], x)
            for block in stage["b"]:
                x = self.through(block, x)
        for block in (self.down1, self.down2, self.down3, self.again):
            x = self.through(block, x)
        return self.tail(x)


class Remembering(nn.Module):
    """A model that writes buffers in its forward: a small count, and a cache that by its size cannot be taken for
    state.
    """

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(D, D)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("cache", torch.zeros(72 * 1024), persistent=False)  # 288 KiB
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.proj(x) + self.cache[: x.numel()].view_as(x)
        with torch.no_grad():
            self.calls += 1
            self.cache[: x.numel()] = 0.5 * y.detach().reshape(-1)
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=(0, 1))
        return x + torch.tanh(y - self.mean)


class Buffers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Remembering() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Outside(Net):
    """A model that uses weights without their module's forward, bare parameters, and a checkpoint inside a block's
    run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(D))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.other = nn.Linear(D, D)
        self.table = nn.Embedding(9, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = self.through(block, x)
            other = self.blocks[(index + 2) % 4]
            x = x + 0.1 * F.linear(F.linear(x, other.up.weight, other.up.bias), other.down.weight)
        x = x @ self.other.weight.t() + self.table.weight[3] * self.scale
        return torch.cat([x, self.table.weight.sum(0).expand_as(x)], dim=-1)


class Normed(Net):
    """A model with BatchNorm, whose statistics are buffers that the model writes in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(D, D, 3, padding=1), nn.BatchNorm1d(D), nn.ReLU()) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(1, 2)
        for block in self.blocks:
            x = self.through(block, x)
        return x


class Odd(Net):
    """A model with transposed, complex and shared weights, a parametrised weight, and a weight that two blocks use."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        for block in self.blocks:
            block.up.weight = nn.Parameter(torch.randn(D, 4 * D).t() / 4)
        self.blocks[2].down.weight = self.blocks[0].down.weight
        self.waves = nn.ParameterList(torch.randn(D, D, dtype=torch.complex64) / 4 for _ in range(2))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.through(block, x)
        for wave in self.waves:
            x = x + (x.to(wave.dtype) @ wave).real
        return self.normed(x)


class InnerCheckpoint(Net):
    """A model whose blocks checkpoint their own middle part."""

    class Part(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            middle = lambda y: F.gelu(self.up(self.norm(y)))  # noqa: E731
            hidden = checkpoint(middle, x, use_reentrant=False) if torch.is_grad_enabled() else middle(x)
            return x + self.down(hidden)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Part() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.through(block, x)
        return x


WIDE = 128  # features of the models below: weights of 64 KiB and more, which pack


class WideBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDE)
        self.up = nn.Linear(WIDE, 4 * WIDE)
        self.down = nn.Linear(4 * WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class WideAdapted(nn.Module):
    """A linear layer with a trainable low-rank part."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 4, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(4, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class WideModel(nn.Module):
    """Frozen bfloat16 blocks, checkpointed if gradients are enabled; ``adapted``: with trainable low-rank parts."""

    def __init__(self, depth: int = 6, adapted: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WideBlock() for _ in range(depth))
        self.bfloat16().requires_grad_(False)
        if adapted:
            for block in self.blocks:
                block.up = WideAdapted(block.up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if torch.is_grad_enabled() else block(x)
        return x


def wide_inputs(seed: int = 0) -> torch.Tensor:
    return torch.randn(3, WIDE, generator=torch.Generator().manual_seed(seed)).bfloat16()


@dataclass(frozen=True)
class Case:
    """A model to build and its inputs. ``slots``: the least number of slots of the largest unit's size that its use
    needs.
    """

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (2, 6, D)
    vocabulary: int = 0
    slots: int = 1
    smooth: bool = True  # twice differentiable by torch's own kernels

    def build(self, checkpoint: str = "none", *, seed: int = 0) -> nn.Module:
        """Return the model with the weights of ``seed``, all trainable, in training mode.

        The global random generators are not changed.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.make()
        model.checkpoint = checkpoint  # type: ignore[assignment]
        return model

    def inputs(self, seed: int = 0, device: Any = "cpu") -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        if self.vocabulary:
            return torch.randint(0, self.vocabulary, self.shape, generator=generator).to(device)
        return torch.randn(self.shape, generator=generator).to(device)


CASES = {
    case.name: case
    for case in (
        Case("stack", Stack),
        Case("dropout", lambda: Stack(depth=4, dropout=0.3)),
        Case("heterogeneous", Heterogeneous),
        Case("conv1d", lambda: Convolutions(1), (2, 16, 8)),
        Case("conv2d", lambda: Convolutions(2), (2, 4, 8, 8)),
        Case("conv2d channels last", lambda: Convolutions(2, True), (2, 4, 8, 8)),
        Case("conv3d", lambda: Convolutions(3), (1, 4, 4, 4, 4)),
        Case("attention", Attention, smooth=False),
        Case("encoder", Encoder, smooth=False),
        Case("lstm", Recurrent, smooth=False),
        Case("tied", Tied, (2, 6), 50),
        Case("experts", Experts),
        Case("nested", Nested),
        Case("buffers", Buffers, smooth=False),
        Case("outside", Outside, slots=2),
        Case("batchnorm", Normed, (3, 6, D), smooth=False),
        Case("odd", Odd, slots=2),
        Case("inner checkpoint", InnerCheckpoint),
    )
}


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers, counting each tensor once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def freeze(model: nn.Module) -> nn.Module:
    """Freeze matrices and keep vectors (norms, biases) trainable in place of adapters; return the model."""
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() <= 1 and parameter.is_floating_point())
    return model
