"""Model shapes for planning on paper: layers, parameters and widths, and the named models with their sources.

A `Shape` is a list of `Group`s of equal layers. It knows no device and no quantisation. `carom plan` takes one by name
(SHAPES here), or reads it from a checkpoint or a config.json (shape_files.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .presets import Quant, find


@dataclass(frozen=True)
class Group:
    """`count` layers of one kind.

    `params`: parameters of a layer, routed experts included; `expert_params`: the routed experts' share of them;
    `active_params`: those one token is multiplied with. Widths are elements per token: `attention_width` of queries
    (0: none), `live_width` of what is alive at once within a layer's forward, `saved_width` of what its backward keeps.
    `adapter_width`: sum of (inputs + outputs) over the linears that adapters wrap. `repeated` is False for what stands
    outside the layers (embeddings, head), which quantisers leave in 16 bits. `stored_bytes`: bytes of a layer in the
    checkpoint that was read, where one was.
    """

    name: str
    count: int
    params: int
    active_params: int
    expert_params: int = 0
    attention_width: int = 0
    live_width: int = 0
    saved_width: int = 0
    adapter_width: int = 0
    repeated: bool = True
    stored_bytes: int | None = None

    def bytes_in(self, quant: Quant | None) -> int:
        """Raw bytes of one layer; `quant` None: as the checkpoint stores it (16 bits where none was read)."""
        if quant is None:
            return self.stored_bytes if self.stored_bytes is not None else self.params * 2
        bits = (quant.dense, quant.experts) if self.repeated else (max(quant.dense, 16), max(quant.dense, 16))
        dense = self.params - self.expert_params
        return int(dense * bits[0] / 8 + self.expert_params * bits[1] / 8)


@dataclass(frozen=True)
class Shape:
    """A model. `kind`: "diffusion", "language" (answers a token at a time) or "encoder" (all tokens pass once, as in text
    encoders and embedding models); `sample_tokens`: tokens of one sample (an image, a clip, a sequence);
    `hidden`: width of what passes from layer to layer; `vocabulary`: rows of the output head that training computes a
    loss over (0: none, or not counted); `kv_width`: elements a token leaves in each layer's KV cache."""

    name: str
    title: str
    source: str
    kind: str
    groups: tuple[Group, ...]
    hidden: int
    sample_tokens: int
    sample: str
    vocabulary: int = 0
    kv_width: int = 0
    note: str = ""

    @property
    def layers(self) -> int:
        return sum(group.count for group in self.groups if group.repeated)

    @property
    def params(self) -> int:
        return sum(group.count * group.params for group in self.groups)

    @property
    def active_params(self) -> int:
        return sum(group.count * group.active_params for group in self.groups)

    def bytes_in(self, quant: Quant | None) -> int:
        return sum(group.count * group.bytes_in(quant) for group in self.groups)

    def attention_per_token(self, context: float) -> float:
        """FLOPs of scores and values for one token over `context` tokens: 2 products of 2 FLOPs; half where causal."""
        causal = 0.5 if self.kind == "language" else 1.0
        return sum(4 * causal * context * group.count * group.attention_width for group in self.groups)


def widths(
    hidden: int, query: int, kv: int, ff: int, *, gated: bool, modulated: bool = False, copies: int = 0
) -> dict:
    """`live_width` and `saved_width` of a transformer layer.

    Forward: 9 hidden + 2 ff (3 when gated); 17 x 3072 a token for Flux.1, as measured (0.45 GiB at 4608 tokens).
    Backward, counted tensor by tensor for a frozen base with adapters: norms, residuals, queries and attention output
    (5 hidden-wide and the query), keys and values, the MLP's saved tensors and gradients (4 ff, 6 when gated); 4 more
    hidden-wide for modulation; `copies` hidden-wide for tokens handed to experts and back.
    """
    live = 9 * hidden + (3 if gated else 2) * ff + copies * hidden
    saved = (
        5 * hidden
        + query
        + 2 * kv
        + (6 if gated else 4) * ff
        + (4 * hidden if modulated else 0)
        + copies * hidden
    )
    return {"live_width": live, "saved_width": saved}


def language_layer(
    name: str, count: int, hidden: int, heads: int, kv_heads: int, head_dim: int, ff: int,
    *, experts: int = 0, used: int = 0, expert_ff: int = 0, shared_ff: int = 0, gated: bool = True,
) -> Group:  # fmt: skip
    """A decoder's or encoder's layer: grouped-query attention and an MLP, or (with `experts`) an MoE of gated experts."""
    query, kv = heads * head_dim, kv_heads * head_dim
    attention = 2 * hidden * query + 2 * hidden * kv
    dense_ff = shared_ff if experts else ff
    matrices = 3 if gated else 2
    dense = attention + matrices * hidden * dense_ff + hidden * experts
    routed = experts * 3 * hidden * expert_ff
    adapters = 2 * (hidden + query) + 2 * (hidden + kv) + (matrices * (hidden + dense_ff) if dense_ff else 0)
    return Group(
        name, count, dense + routed, dense + used * 3 * hidden * expert_ff, routed,
        attention_width=query, adapter_width=adapters,
        **widths(hidden, query, kv, dense_ff + used * expert_ff, gated=gated, copies=2 * used),
    )  # fmt: skip


def language_model(
    name: str, title: str, source: str, groups: tuple[Group, ...], hidden: int, vocabulary: int, kv: int,
    *, tied: bool = False, note: str = "",
) -> Shape:  # fmt: skip
    """Layers, an embedding (looked up: no matrix product) and a head (the same matrix where `tied`)."""
    rows = hidden * vocabulary
    outside: tuple[Group, ...] = (Group("head (and embedding, tied)", 1, rows, rows, repeated=False),)
    if not tied:
        outside = (
            Group("embedding", 1, rows, 0, repeated=False),
            Group("head", 1, rows, rows, repeated=False),
        )
    return Shape(
        name, title, source, "language", groups + outside, hidden, 1024, "1024-token sequence",
        vocabulary=vocabulary, kv_width=2 * kv, note=note,
    )  # fmt: skip


def encoder(
    name: str, title: str, source: str, groups: tuple[Group, ...], hidden: int, vocabulary: int
) -> Shape:
    """Layers and an embedding; what it gives is what the last layer gives."""
    outside = (Group("embedding", 1, hidden * vocabulary, 0, repeated=False),) if vocabulary else ()
    return Shape(name, title, source, "encoder", groups + outside, hidden, 512, "512-token sequence")


def diffusion_layer(
    name: str, count: int, params: int, active: int, hidden: int, ff: int,
    *, gated: bool = False, modulated: bool = True, adapter_width: int | None = None,
) -> Group:  # fmt: skip
    """A diffusion transformer layer; `active` counts one token's way (its own stream's matrices, no modulation)."""
    mlp = (3 if gated else 2) * (hidden + ff)
    return Group(
        name, count, params, active, attention_width=hidden,
        adapter_width=8 * hidden + mlp if adapter_width is None else adapter_width,
        **widths(hidden, hidden, hidden, ff, gated=gated, modulated=modulated),
    )  # fmt: skip


def _outside(total: int, groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """What `total` parameters hold beyond `groups`: embedders, shared modulation, output. One vector a sample passes."""
    rest = total - sum(group.count * group.params for group in groups)
    return (*groups, Group("outside the layers", 1, rest, 0, repeated=False))


def flux1(
    name: str, title: str, source: str, double: int = 19, single: int = 38, hidden: int = 3072, total: int = 0
):
    """Flux.1: double blocks of two streams (18 d^2 each, 6 of them modulation), single blocks of 15 d^2 (3 modulation)."""
    square = hidden * hidden
    groups = (
        diffusion_layer("double block", double, 36 * square, 12 * square, hidden, 4 * hidden, adapter_width=36 * hidden),
        diffusion_layer("single block", single, 15 * square, 12 * square, hidden, 4 * hidden, adapter_width=14 * hidden),
    )  # fmt: skip
    return Shape(
        name, title, source, "diffusion", _outside(total, groups) if total else groups, hidden,
        4096 + 512, "1024 x 1024 image with 512 text tokens",
    )  # fmt: skip


def flux2(
    name: str, title: str, source: str, double: int = 8, single: int = 48, hidden: int = 6144, total: int = 0
):
    """Flux.2: as Flux.1 with a gated MLP of 3 d (13 d^2 a stream) and modulation shared by all blocks."""
    square = hidden * hidden
    groups = (
        diffusion_layer("double block", double, 26 * square, 13 * square, hidden, 3 * hidden, gated=True, adapter_width=38 * hidden),
        diffusion_layer("single block", single, 13 * square, 13 * square, hidden, 3 * hidden, gated=True, adapter_width=15 * hidden),
    )  # fmt: skip
    return Shape(
        name, title, source, "diffusion", _outside(total, groups) if total else groups, hidden,
        4096 + 512, "1024 x 1024 image with 512 text tokens",
    )  # fmt: skip


def qwen_image(name: str, title: str, source: str, layers: int = 60, hidden: int = 3072, total: int = 0):
    """Qwen-Image: double blocks throughout (two streams of 18 d^2, 6 of them modulation)."""
    square = hidden * hidden
    groups = (
        diffusion_layer(
            "block", layers, 36 * square, 12 * square, hidden, 4 * hidden, adapter_width=36 * hidden
        ),
    )
    return Shape(
        name, title, source, "diffusion", _outside(total, groups) if total else groups, hidden,
        4096 + 256, "1024 x 1024 image with 256 text tokens",
    )  # fmt: skip


def wan(
    name: str,
    title: str,
    source: str,
    layers: int = 40,
    hidden: int = 5120,
    ff: int = 13824,
    total: int = 0,
    note="",
):
    """Wan: self-attention 4 d^2, cross-attention 4 d^2 (half of it over the few text tokens), MLP."""
    square = hidden * hidden
    params = 8 * square + 2 * hidden * ff
    groups = (
        diffusion_layer(
            "block",
            layers,
            params,
            6 * square + 2 * hidden * ff,
            hidden,
            ff,
            adapter_width=16 * hidden + 2 * (hidden + ff),
        ),
    )
    return Shape(
        name, title, source, "diffusion", _outside(total, groups) if total else groups, hidden,
        21 * 30 * 52, "81-frame 832 x 480 clip", note=note,
    )  # fmt: skip


def z_image(
    name: str,
    title: str,
    source: str,
    layers: int = 30,
    refiners: int = 4,
    hidden: int = 3840,
    ff: int = 10240,
    total: int = 0,
):
    """Z-Image: one stream, attention 4 d^2 and a gated MLP; its refiners are layers of the same kind."""
    params = 4 * hidden * hidden + 3 * hidden * ff
    groups = (diffusion_layer("block", layers + refiners, params, params, hidden, ff, gated=True),)
    return Shape(
        name, title, source, "diffusion", _outside(total, groups) if total else groups, hidden,
        4096 + 256, "1024 x 1024 image with 256 text tokens",
    )  # fmt: skip


def _published(group: Group, *, params: int, active: int, expert: int = 0) -> Group:
    """A layer with the note's figures; no attention FLOPs, because its formulas have none."""
    return replace(group, params=params, active_params=active, expert_params=expert, attention_width=0)


def _diffusers(cls: str, total: float) -> str:
    return f"diffusers {cls}: the class's default configuration, parameters counted on meta ({total} B)"


_NOTE = "published design note on partial-resident QLoRA"


def _named() -> tuple[Shape, ...]:
    llama70 = language_layer("layer", 80, 8192, 64, 8, 128, 28672)
    glm = language_layer("layer", 92, 5120, 96, 8, 128, 12288)
    experts, used = 160, 8
    expert = 3 * 5120 * 1536
    moe_widths = widths(5120, 96 * 128, 1024, 9 * 1536, gated=True, copies=2 * used)
    # A U-Net works at three resolutions: one token here is one of 32 x 32 positions, which is 4 at the 640-wide and 16
    # at the 320-wide level. Residual and resampling convolutions: parameters and positions summed level by level.
    convolutions = 21
    conv_params, conv_active = 350_941_760, 853_228_160
    unet = (
        Group(
            "transformer block, 1280 wide", 60, 34_755_840, 18 * 1280 * 1280, attention_width=1280,
            adapter_width=39_936, **widths(1280, 1280, 1280, 5120, gated=True),
        ),
        Group(
            "transformer block, 640 wide", 10, 10_005_120, 4 * 18 * 640 * 640, attention_width=16 * 640,
            adapter_width=22_016, **widths(4 * 640, 4 * 640, 4 * 640, 4 * 2560, gated=True),
        ),
        Group(
            "residual or resampling block", convolutions, conv_params // convolutions, conv_active // convolutions,
            live_width=9 * 16 * 320, saved_width=16 * 16 * 320,
        ),
    )  # fmt: skip
    return (
        flux1("flux1-dev", "Flux.1-dev", _diffusers("FluxTransformer2DModel", 11.901), total=11_901_408_320),
        flux2("flux2-dev", "Flux.2-dev", _diffusers("Flux2Transformer2DModel", 32.223), total=32_223_281_152),
        qwen_image("qwen-image", "Qwen-Image", _diffusers("QwenImageTransformer2DModel", 20.430), total=20_430_401_088),
        wan(
            "wan2.2-14b", "Wan 2.2 14B", _diffusers("WanTransformer3DModel", 14.288), total=14_288_491_584,
            note="Wan 2.2 is two such models, one for the noisy steps and one for the rest; one is at work at a time.",
        ),
        z_image("z-image", "Z-Image", _diffusers("ZImageTransformer2DModel", 6.155), total=6_154_908_736),
        Shape(
            "sdxl", "SDXL (U-Net)", "diffusers UNet2DConditionModel with the published SDXL base configuration, blocks "
            "counted on meta (2.567 B)", "diffusion", _outside(2_567_463_684, unet), 1280,
            1024, "1024 x 1024 image",
            note="A U-Net's blocks differ in size and resolution; tokens count its 32 x 32 level.",
        ),
        language_model(
            "llama3-8b", "Llama-3-8B", "config.json of Meta-Llama-3-8B",
            (language_layer("layer", 32, 4096, 32, 8, 128, 14336),), 4096, 128256, 1024,
        ),
        language_model(
            "llama3-70b", "Llama-3-70B", "config.json of Meta-Llama-3-70B", (llama70,), 8192, 128256, 1024,
        ),
        Shape(
            "llama-70b", "Llama-70B (published figures)", f"{_NOTE}: 80 layers, 470 MB each in NF4, 1.05 B active "
            "parameters a layer; widths from config.json of Meta-Llama-3-70B", "language",
            (_published(llama70, params=llama70.params, active=1_050_000_000),), 8192, 1024, "1024-token sequence",
            kv_width=2048,
            note="Embedding and head are not counted, as in the published note; `llama3-70b` counts them.",
        ),
        Shape(
            "glm-4.7", "GLM-4.7 355B MoE (published figures)", f"{_NOTE}: 92 layers of 4.10 B parameters, 160 experts "
            "of 23.6 M, 8 in use, 514 M active; widths from the GLM-4.5 family's config.json", "language",
            (replace(
                _published(glm, params=324_000_000 + experts * expert, active=514_000_000, expert=experts * expert),
                **moe_widths,
            ),), 5120, 1024, "1024-token sequence", kv_width=2048,
            note="Embedding and head are not counted, as in the published note. Adapters go on the dense parts only.",
        ),
        language_model(
            "qwen3-32b", "Qwen3-32B", "config.json of Qwen3-32B",
            (language_layer("layer", 64, 5120, 64, 8, 128, 25600),), 5120, 151936, 1024,
        ),
        language_model(
            "mistral-small-24b", "Mistral Small 24B", "config.json of Mistral-Small-3.1-24B, text part (Flux.2's text encoder)",
            (language_layer("layer", 40, 5120, 32, 8, 128, 32768),), 5120, 131072, 1024,
        ),
    )  # fmt: skip


SHAPES: dict[str, Shape] = {shape.name: shape for shape in _named()}
# Other names people write, beyond case, blanks and dashes.
ALIASES = {
    "flux": "flux1-dev", "flux.1": "flux1-dev", "flux-dev": "flux1-dev", "flux.2": "flux2-dev",
    "wan2.2": "wan2.2-14b", "wan-14b": "wan2.2-14b", "llama-8b": "llama3-8b", "llama": "llama3-8b", "glm": "glm-4.7",
}  # fmt: skip


def find_shape(asked: str) -> Shape:
    """The named shape meant by `asked`; ValueError gives the nearest names."""
    alias = ALIASES.get(asked.lower().strip())
    return SHAPES[alias] if alias else find("model", asked, SHAPES)
