"""The model of `carom demo`: a Llama-like decoder in plain torch, its safetensors checkpoint, and LoRA
adapters.

Nothing here refers to Carom, to show that Carom streams ordinary models.
Architecture: Touvron et al., "LLaMA" (2023); rotary positions: Su et al., "RoFormer" (2021);
SwiGLU: Shazeer, "GLU Variants Improve Transformer" (2020); LoRA: Hu et al. (2021).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SHARD_BYTES = 512 << 20  # save_file copies the tensors that it writes; small shards limit that copy
WIDTHS = (64, 128, 256, 640, 1024, 2048, 3072, 4096)


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder. ``width``: features; ``hidden``: width of the feed-forward."""

    width: int
    layers: int
    heads: int
    hidden: int
    vocabulary: int
    dtype: torch.dtype

    @property
    def block_parameters(self) -> int:
        """The number of parameters of a block: four attention matrices, three feed-forward matrices, two
        norms.
        """
        return 4 * self.width**2 + 3 * self.width * self.hidden + 2 * self.width

    @property
    def weight_bytes(self) -> int:
        """The bytes of all weights: blocks, embedding, final norm, head."""
        ends = (2 * self.vocabulary + 1) * self.width
        return (self.layers * self.block_parameters + ends) * self.dtype.itemsize


def config_for(weight_bytes: int, dtype: torch.dtype, least_layers: int = 12) -> DecoderConfig:
    """Return the widest decoder that reaches ``weight_bytes`` bytes with ``least_layers`` or more blocks.

    Smaller models may have fewer blocks, down to 2. Raises ValueError where even the narrowest decoder is too
    large.
    """
    best: DecoderConfig | None = None
    for width in WIDTHS:
        # 8/3 of the width, as in LLaMA, rounded up to a multiple of 64.
        hidden = -(-8 * width // 3 // 64) * 64
        empty = DecoderConfig(width, 0, max(width // 64, 1), hidden, min(32 * 1024, 8 * width), dtype)
        left = weight_bytes - empty.weight_bytes
        layers = -(-left // (empty.block_parameters * dtype.itemsize))
        if layers >= least_layers or (best is None and layers >= 2):
            best = DecoderConfig(width, layers, empty.heads, hidden, empty.vocabulary, dtype)
    if best is None:
        raise ValueError(f"--size {weight_bytes} is too small for a decoder; ask for 1MiB or more")
    return best


class RMSNorm(nn.Module):
    """A root-mean-square normalisation over the last dimension (Zhang and Sennrich, 2019)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x``."""
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-6)


class Attention(nn.Module):
    """A causal self-attention with rotary positions, from (batch, tokens, width) to the same shape."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(config.width, config.width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the attention output for ``x``; ``cos``, ``sin``: see `rotary`."""
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """A SwiGLU feed-forward: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.up_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the feed-forward output for ``x``."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A decoder block: attention and feed-forward, each after a norm and with a residual connection."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(config.width), Attention(config)
        self.mlp_norm, self.mlp = RMSNorm(config.width), FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the block's output for ``x`` (batch, tokens, width)."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """A decoder from token numbers (batch, tokens) to logits (batch, tokens, vocabulary)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits; with gradients enabled, blocks use activation checkpointing."""
        x = self.embed(tokens)
        cos, sin = rotary(tokens.shape[1], self.config.width // self.config.heads, x)
        for layer in self.layers:
            if torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, use_reentrant=False)
            else:
                x = layer(x, cos, sin)
        return self.head(self.norm(x))


def rotary(tokens: int, head_width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the rotary angles, each (tokens, head_width), in the dtype of ``like``."""
    steps = torch.arange(0, head_width, 2, device=like.device, dtype=torch.float32)
    angles = torch.outer(torch.arange(tokens, device=like.device).float(), 10_000 ** (-steps / head_width))
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` (batch, heads, tokens, head_width) by the angles of each token's position."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class Lora(nn.Module):
    """A frozen linear layer plus a trainable low-rank product (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base

        def noise(rows: int, columns: int) -> nn.Parameter:
            """Return a random matrix as a parameter, in the dtype and on the device of the base's weight."""
            values = torch.randn(rows, columns, generator=generator) / columns**0.5
            return nn.Parameter(values.to(base.weight))

        # Both matrices are random. With a zero matrix, as LoRA usually starts, half of the gradients would be
        # zero, and their comparison would prove nothing.
        self.down, self.up = noise(rank, base.in_features), noise(base.out_features, rank)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for ``x``."""
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


def add_lora(model: Decoder, rank: int, seed: int) -> dict[str, nn.Parameter]:
    """Wrap every linear layer of every block in `Lora` and return the adapters' parameters by name.

    The same seed gives the same adapters.
    """
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    for parent in list(model.layers.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, Lora(child, rank, generator))
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def remove_lora(model: Decoder) -> None:
    """Remove the adapters and restore the wrapped linear layers."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Lora):
                setattr(parent, name, child.base)


def shapes(config: DecoderConfig) -> Iterator[tuple[str, torch.Size]]:
    """Yield the name and shape of every weight, without allocating memory for weights."""
    with torch.device("meta"):
        model = Decoder(config)
    for name, parameter in model.named_parameters():
        yield name, parameter.shape


def write_checkpoint(
    config: DecoderConfig, folder: Path, device: torch.device, seed: int, progress: Callable[[int], object]
) -> None:
    """Write seeded random weights as sharded safetensors files with an index, as model hubs do.

    ``device``: where the random numbers are drawn, because a GPU draws gigabytes much faster; ``progress``:
    called with the bytes of each tensor. Raises OSError where the files cannot be written.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    shard: dict[str, Tensor] = {}
    index: dict[str, str] = {}

    def flush() -> None:
        """Write the collected tensors as one shard."""
        name = f"model-{len(set(index.values())) + 1:05d}.safetensors"
        try:
            save_file(shard, folder / name, metadata={"format": "pt"})
        except Exception as error:  # safetensors raises an error class of its own where the disk is full
            raise OSError(f"the checkpoint could not be written to {folder}: {error}") from error
        index.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, shape in shapes(config):
        if len(shape) == 1:
            values = torch.rand(shape, generator=generator, device=device) + 0.5
        else:
            values = torch.randn(shape, generator=generator, device=device)
            values *= 1.0 if name.startswith("embed") else shape[1] ** -0.5
        shard[name] = values.to(config.dtype).cpu()
        progress(shard[name].nbytes)
        if sum(t.nbytes for t in shard.values()) >= SHARD_BYTES:
            flush()
    if shard:
        flush()
    text = json.dumps({"metadata": {"total_size": config.weight_bytes}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text, "utf-8")


def load_checkpoint(config: DecoderConfig, folder: Path, progress: Callable[[int], object]) -> Decoder:
    """Return the decoder with the checkpoint's weights, on CPU and frozen; ``progress``: called with bytes
    read.
    """
    with torch.device("meta"):
        model = Decoder(config).to(config.dtype)
    # The weights are copied and not memory-mapped: a mapped tensor may start at any byte, and kernels may add
    # in another order for another alignment.
    model = model.to_empty(device="cpu").requires_grad_(False)
    weights = dict(model.named_parameters())
    index = json.loads((folder / "model.safetensors.index.json").read_text("utf-8"))["weight_map"]
    for shard in sorted(set(index.values())):
        with safe_open(folder / shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                weights[name].copy_(file.get_tensor(name))
                progress(weights[name].nbytes)
    return model
