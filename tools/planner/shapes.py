"""Descriptions of models for the planner: layers, parameters and widths, and a table of known models with
sources.

A `Shape` consists of `Group`s of equal layers, and depends on no device and no quantisation. `carom plan`
looks a shape up by name (SHAPES), or reads a shape from a checkpoint or a config.json (shape_files.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .presets import Quant, find


@dataclass(frozen=True)
class Group:
    """A group of `count` equal layers.

    `params`: parameters of one layer, routed experts included; `expert_params`: parameters of its routed
    experts; `active_params`: parameters that one token is multiplied with. Widths are elements per token:
    `attention_width` of the queries (0: no attention), `live_width` of the tensors alive at once in the
    layer's forward, `saved_width` of the tensors its backward needs. `adapter_width`: sum of (inputs +
    outputs) over the linear layers that get adapters. `repeated`: False for weights outside the layers
    (embeddings, head), which quantisers leave in 16 bits. `stored_bytes`: bytes of one layer in the
    checkpoint, None where no checkpoint was read. `largest`: parameters of the layer's largest tensor; a session
    divides a layer into parts, but no tensor (0: not known, so the layer streams whole).
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
    largest: int = 0

    def bytes_in(self, quant: Quant | None) -> int:
        """Return the bytes of one layer in format `quant`; None: as in the checkpoint, or 16 bits where none
        was read.
        """
        if quant is None:
            return self.stored_bytes if self.stored_bytes is not None else self.params * 2
        bits = (quant.dense, quant.experts) if self.repeated else (max(quant.dense, 16), max(quant.dense, 16))
        dense = self.params - self.expert_params
        return int(dense * bits[0] / 8 + self.expert_params * bits[1] / 8)


@dataclass(frozen=True)
class Shape:
    """A model described by its groups of layers.

    `kind`: "diffusion", "language" (generates a token at a time) or "encoder" (processes all tokens once, as
    text encoders and embedding models do); `hidden`: width of the activations between layers;
    `sample_tokens`: tokens of one sample (an image, a clip, a sequence), which `sample` describes;
    `vocabulary`: rows of the output head over which training computes a loss (0: none, or not counted);
    `kv_width`: elements per token in each layer's KV cache; `source`: where the figures come from; `family`: the kind
    of architecture, which decides the efficiency (efficiency.py): "dit", "mmdit", "single-stream", "unet", "decoder"
    or "encoder" ("": not recognised).
    """

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
    family: str = ""

    @property
    def layers(self) -> int:
        """The number of layers, without embeddings and heads."""
        return sum(group.count for group in self.groups if group.repeated)

    @property
    def params(self) -> int:
        """The number of parameters."""
        return sum(group.count * group.params for group in self.groups)

    @property
    def active_params(self) -> int:
        """The number of parameters that one token is multiplied with."""
        return sum(group.count * group.active_params for group in self.groups)

    def bytes_in(self, quant: Quant | None) -> int:
        """Return the bytes of all weights in format `quant` (None: see `Group.bytes_in`)."""
        return sum(group.count * group.bytes_in(quant) for group in self.groups)

    def attention_per_token(self, context: float) -> float:
        """Return the FLOPs of attention for one token over `context` tokens: two matrix products; half with a
        causal mask.
        """
        causal = 0.5 if self.kind == "language" else 1.0
        return sum(4 * causal * context * group.count * group.attention_width for group in self.groups)


def widths(
    hidden: int, query: int, kv: int, ff: int, *, gated: bool, modulated: bool = False, copies: int = 0
) -> dict:
    """Return {"live_width": ..., "saved_width": ...} of a transformer layer, in elements per token.

    `hidden`, `query`, `kv` and `ff`: widths of the layer's input, queries, keys and MLP. The forward has 9
    hidden + 2 ff elements alive (3 ff when the MLP is gated): 17 x 3072 per token for Flux.1, as measured
    (0.45 GiB at 4608 tokens). The backward is counted tensor by tensor for frozen weights with adapters:
    norms, residuals and attention output (5 hidden) and the query, keys and values, the MLP's saved tensors
    and gradients (4 ff, 6 when gated), 4 more hidden for modulation, and `copies` x hidden for tokens sent to
    experts and back.
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
    """Return a group of decoder or encoder layers: grouped-query attention, and an MLP or a mixture of gated
    experts.

    `ff`: width of the MLP; `experts`: number of routed experts (0: an MLP); `used`: experts that a token
    uses; `expert_ff`, `shared_ff`: widths of a routed expert and of the shared experts.
    """
    query, kv = heads * head_dim, kv_heads * head_dim
    attention = 2 * hidden * query + 2 * hidden * kv
    dense_ff = shared_ff if experts else ff
    matrices = 3 if gated else 2
    dense = attention + matrices * hidden * dense_ff + hidden * experts
    routed = experts * 3 * hidden * expert_ff
    adapters = 2 * (hidden + query) + 2 * (hidden + kv) + (matrices * (hidden + dense_ff) if dense_ff else 0)
    largest = hidden * max(query, dense_ff, expert_ff if experts else 0)
    return Group(
        name, count, dense + routed, dense + used * 3 * hidden * expert_ff, routed,
        attention_width=query, adapter_width=adapters, largest=largest,
        **widths(hidden, query, kv, dense_ff + used * expert_ff, gated=gated, copies=2 * used),
    )  # fmt: skip


def language_model(
    name: str, title: str, source: str, groups: tuple[Group, ...], hidden: int, vocabulary: int, kv: int,
    *, tied: bool = False, note: str = "",
) -> Shape:  # fmt: skip
    """Return a language model: layers, an embedding (a lookup without matrix product), and a head.

    `tied`: whether embedding and head share a matrix; `kv`: width of the keys.
    """
    rows = hidden * vocabulary
    outside: tuple[Group, ...] = (Group("head (and embedding, tied)", 1, rows, rows, repeated=False),)
    if not tied:
        outside = (
            Group("embedding", 1, rows, 0, repeated=False),
            Group("head", 1, rows, rows, repeated=False),
        )
    return Shape(
        name, title, source, "language", groups + outside, hidden, 1024, "1024-token sequence",
        vocabulary=vocabulary, kv_width=2 * kv, note=note, family="decoder",
    )  # fmt: skip


def encoder(
    name: str, title: str, source: str, groups: tuple[Group, ...], hidden: int, vocabulary: int
) -> Shape:
    """Return a text encoder: layers and an embedding, without a head."""
    outside = (Group("embedding", 1, hidden * vocabulary, 0, repeated=False),) if vocabulary else ()
    return Shape(
        name, title, source, "encoder", groups + outside, hidden, 512, "512-token sequence", family="encoder"
    )


def diffusion_layer(
    name: str, count: int, params: int, active: int, hidden: int, ff: int,
    *, gated: bool = False, modulated: bool = True, adapter_width: int | None = None, largest: int = 0,
) -> Group:  # fmt: skip
    """Return a group of diffusion transformer layers.

    `active`: parameters that one token is multiplied with, which are the matrices of the token's own stream
    without modulation. `largest`: parameters of the largest matrix; 0: hidden x ff.
    """
    mlp = (3 if gated else 2) * (hidden + ff)
    return Group(
        name, count, params, active, attention_width=hidden, largest=largest or hidden * ff,
        adapter_width=8 * hidden + mlp if adapter_width is None else adapter_width,
        **widths(hidden, hidden, hidden, ff, gated=gated, modulated=modulated),
    )  # fmt: skip


def _outside(total: int, groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """Return `groups` with one more group for the rest of the model's `total` parameters.

    The rest (embedders, shared modulation, output layers) has no active parameters, because it is applied to
    one vector per sample.
    """
    rest = total - sum(group.count * group.params for group in groups)
    return (*groups, Group("outside the layers", 1, rest, 0, repeated=False))


def flux1(
    name: str, title: str, source: str, double: int = 19, single: int = 38, hidden: int = 3072, total: int = 0
):
    """Return a Flux.1 model, with d = `hidden`.

    A double block has two streams of 18 d^2 parameters, 6 of them for modulation; a single block has 15 d^2,
    3 for modulation. The largest matrices have 6 d^2 and 7 d^2.
    """
    square = hidden * hidden
    groups = (
        diffusion_layer("double block", double, 36 * square, 12 * square, hidden, 4 * hidden, adapter_width=36 * hidden, largest=6 * square),
        diffusion_layer("single block", single, 15 * square, 12 * square, hidden, 4 * hidden, adapter_width=14 * hidden, largest=7 * square),
    )  # fmt: skip
    return Shape(
        name, title, source, "diffusion", _outside(total, groups) if total else groups, hidden,
        4096 + 512, "1024 x 1024 image with 512 text tokens", family="mmdit",
    )  # fmt: skip


def flux2(
    name: str, title: str, source: str, double: int = 8, single: int = 48, hidden: int = 6144, total: int = 0
):
    """Return a Flux.2 model: as Flux.1, with a gated MLP of width 3 d (13 d^2 a stream) and modulation shared
    by all blocks. The largest matrices have 6 d^2 and 9 d^2.
    """
    square = hidden * hidden
    groups = (
        diffusion_layer("double block", double, 26 * square, 13 * square, hidden, 3 * hidden, gated=True, adapter_width=38 * hidden, largest=6 * square),
        diffusion_layer("single block", single, 13 * square, 13 * square, hidden, 3 * hidden, gated=True, adapter_width=15 * hidden, largest=9 * square),
    )  # fmt: skip
    return Shape(
        name, title, source, "diffusion", _outside(total, groups) if total else groups, hidden,
        4096 + 512, "1024 x 1024 image with 512 text tokens", family="mmdit",
    )  # fmt: skip


def qwen_image(name: str, title: str, source: str, layers: int = 60, hidden: int = 3072, total: int = 0):
    """Return a Qwen-Image model: only double blocks, of two streams of 18 d^2 parameters, 6 of them for
    modulation.
    """
    square = hidden * hidden
    groups = (
        diffusion_layer(
            "block",
            layers,
            36 * square,
            12 * square,
            hidden,
            4 * hidden,
            adapter_width=36 * hidden,
            largest=6 * square,
        ),
    )
    return Shape(
        name, title, source, "diffusion", _outside(total, groups) if total else groups, hidden,
        4096 + 256, "1024 x 1024 image with 256 text tokens", family="mmdit",
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
    """Return a Wan model: self-attention of 4 d^2, cross-attention of 4 d^2 (half of that for the few text
    tokens), MLP.
    """
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
        21 * 30 * 52, "81-frame 832 x 480 clip", note=note, family="dit",
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
    """Return a Z-Image model: one stream, attention of 4 d^2, a gated MLP; its refiners are layers of the
    same kind.
    """
    params = 4 * hidden * hidden + 3 * hidden * ff
    groups = (diffusion_layer("block", layers + refiners, params, params, hidden, ff, gated=True),)
    return Shape(
        name, title, source, "diffusion", _outside(total, groups) if total else groups, hidden,
        4096 + 256, "1024 x 1024 image with 256 text tokens", family="single-stream",
    )  # fmt: skip


def _published(group: Group, *, params: int, active: int, expert: int = 0) -> Group:
    """Return ``group`` with the figures of the published note: no attention FLOPs, because the note counts none, and
    whole layers in the slots.
    """
    return replace(
        group, params=params, active_params=active, expert_params=expert, attention_width=0, largest=0
    )


def _diffusers(cls: str, total: float) -> str:
    """Return the source text for a diffusers class of ``total`` billion parameters."""
    return f"diffusers {cls}: the class's default configuration, parameters counted on meta ({total} B)"


_NOTE = "published design note on partial-resident QLoRA"


def _known_models() -> tuple[Shape, ...]:
    """Return the shapes of all known models."""
    llama70 = language_layer("layer", 80, 8192, 64, 8, 128, 28672)
    glm = language_layer("layer", 92, 5120, 96, 8, 128, 12288)
    experts, used = 160, 8
    expert = 3 * 5120 * 1536
    moe_widths = widths(5120, 96 * 128, 1024, 9 * 1536, gated=True, copies=2 * used)
    # A U-Net works at three resolutions. A token here is one of the 32 x 32 positions at the 1280-wide level,
    # which is 4 positions at the 640-wide and 16 at the 320-wide level. For residual and resampling
    # convolutions, parameters and positions are summed level by level.
    convolutions = 21
    conv_params, conv_active = 350_941_760, 853_228_160
    unet = (
        Group(
            "transformer block, 1280 wide", 60, 34_755_840, 18 * 1280 * 1280, attention_width=1280, largest=8 * 1280 * 1280,
            adapter_width=39_936, **widths(1280, 1280, 1280, 5120, gated=True),
        ),
        Group(
            "transformer block, 640 wide", 10, 10_005_120, 4 * 18 * 640 * 640, attention_width=16 * 640, largest=8 * 640 * 640,
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
            1024, "1024 x 1024 image", family="unet",
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
            kv_width=2048, family="decoder",
            note="Embedding and head are not counted, as in the published note; `llama3-70b` counts them.",
        ),
        Shape(
            "glm-4.7", "GLM-4.7 355B MoE (published figures)", f"{_NOTE}: 92 layers of 4.10 B parameters, 160 experts "
            "of 23.6 M, 8 in use, 514 M active; widths from the GLM-4.5 family's config.json", "language",
            (replace(
                _published(glm, params=324_000_000 + experts * expert, active=514_000_000, expert=experts * expert),
                **moe_widths,
            ),), 5120, 1024, "1024-token sequence", kv_width=2048, family="decoder",
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


SHAPES: dict[str, Shape] = {shape.name: shape for shape in _known_models()}
# Other names for known models. Names that differ only in case, blanks and dashes need no entry.
ALIASES = {
    "flux": "flux1-dev", "flux.1": "flux1-dev", "flux-dev": "flux1-dev", "flux.2": "flux2-dev",
    "wan2.2": "wan2.2-14b", "wan-14b": "wan2.2-14b", "llama-8b": "llama3-8b", "llama": "llama3-8b", "glm": "glm-4.7",
}  # fmt: skip


def find_shape(asked: str) -> Shape:
    """Return the known model named `asked`.

    Raises ValueError with the most similar names where there is none.
    """
    alias = ALIASES.get(asked.lower().strip())
    return SHAPES[alias] if alias else find("model", asked, SHAPES)
