"""Named shapes, presets, and shapes read from files, good and hostile."""

from __future__ import annotations

import contextlib
import json
import struct

import pytest
import torch
from carom.core.common.errors import CaromError, UnsupportedError, WeightsError
from carom.tools.pack.quant_scheme import parse_scheme
from carom.tools.pack.writer import pack
from carom.tools.planner import model_plan as paper_plan
from carom.tools.planner import presets, shape_configs, shape_files, shapes
from carom.tools.planner.estimate import Job, Machine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

# Parameters counted by building each class on meta with diffusers, or published by its makers, in billions.
COUNTED = {
    "flux1-dev": (11.90, 57), "flux2-dev": (32.22, 56), "qwen-image": (20.43, 60), "wan2.2-14b": (14.29, 40),
    "z-image": (6.155, 34), "sdxl": (2.567, 91), "llama3-8b": (8.03, 32), "llama3-70b": (70.55, 80), "qwen3-32b": (32.76, 64),
    "mistral-small-24b": (23.57, 40),
}  # fmt: skip


@pytest.mark.parametrize("name, expected", COUNTED.items())
def test_named_shapes_have_their_models_parameters_and_layers(name, expected):
    shape = shapes.find_shape(name)
    assert shape.params / 1e9 == pytest.approx(expected[0], rel=0.001)
    assert shape.layers == expected[1]


def test_sdxl_does_the_six_teraflop_of_a_1024_pixel_pass():
    shape = shapes.find_shape("sdxl")
    assert 2 * shape.active_params * shape.sample_tokens == pytest.approx(6e12, rel=0.05)


@pytest.mark.parametrize("shape", shapes.SHAPES.values(), ids=lambda shape: shape.name)
def test_every_named_shape_states_its_source_and_is_coherent(shape):
    assert shape.source and shape.name == shape.name.lower()
    for group in shape.groups:
        assert group.count > 0 and group.params > 0
        assert 0 <= group.expert_params <= group.params
        # A U-Net's convolutions do several positions for each token counted.
        assert group.active_params <= group.params or shape.name in ("sdxl", "llama-70b")
        if group.repeated:
            assert group.live_width > 0 and group.saved_width >= group.live_width / 2


def test_every_alias_leads_to_a_shape():
    for alias in shapes.ALIASES:
        assert shapes.find_shape(alias) in shapes.SHAPES.values()


@pytest.mark.parametrize(
    "written", ["RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090", "rtx-4090", "RTX_4090"]
)
def test_a_card_is_found_however_it_is_written(written):
    assert presets.find("gpu", written, presets.CARDS).name == "rtx4090"


@pytest.mark.parametrize("kind, known, asked, near", [
    ("gpu", presets.CARDS, "rtx4091", "rtx4090"), ("model", shapes.SHAPES, "flux3-dev", "flux2-dev"),
    ("quant", presets.QUANT_BITS, "nf5", "nf4"), ("nvme", presets.DRIVES, "gen6", "gen4"),
])  # fmt: skip
def test_an_unknown_name_raises_the_nearest(kind, known, asked, near):
    with pytest.raises(ValueError, match=near):
        presets.find(kind, asked, known)


def test_a_name_like_nothing_raises_all_that_are_known():
    with pytest.raises(ValueError, match="rtx4090.*h200"):
        presets.find("gpu", "~", presets.CARDS)


def test_every_card_states_a_source():
    assert all(card.source in presets.SOURCES.values() for card in presets.CARDS.values())
    assert set(presets.UPGRADES) <= set(presets.CARDS)


def test_outside_the_layers_keeps_sixteen_bits():
    shape = shapes.find_shape("llama3-8b")
    nf4 = presets.find_quant("nf4")
    head = shape.groups[-1]
    assert head.bytes_in(nf4) == 2 * head.params
    assert shape.groups[0].bytes_in(nf4) == int(shape.groups[0].params * 4.39 / 8)


# ---- files


def tiny_llama(folder, name="model.safetensors", layers=3, dtype=torch.bfloat16):
    tensors = {
        "model.embed_tokens.weight": torch.zeros(100, 16, dtype=dtype),
        "lm_head.weight": torch.zeros(100, 16, dtype=dtype),
    }
    for i in range(layers):
        tensors[f"model.layers.{i}.self_attn.q_proj.weight"] = torch.zeros(16, 16, dtype=dtype)
        tensors[f"model.layers.{i}.mlp.up_proj.weight"] = torch.zeros(64, 16, dtype=dtype)
        tensors[f"model.layers.{i}.norm.weight"] = torch.zeros(16, dtype=dtype)
    save_file(tensors, folder / name)
    return folder / name


def test_a_safetensors_file_is_read_by_its_header(tmp_path):
    path = tiny_llama(tmp_path)
    shape = shape_files.read_shape(path)
    assert (shape.kind, shape.layers, shape.hidden) == ("language", 3, 16)
    assert shape.groups[0].params == 16 * 16 + 64 * 16 + 16
    assert shape.groups[0].active_params == 16 * 16 + 64 * 16
    assert shape.bytes_in(None) == 2 * shape.params


BERT = ("embeddings.word_embeddings.weight", "encoder.layer.{}.attention.self.query.weight")
CLIP = (
    "text_model.embeddings.token_embedding.weight",
    "text_model.encoder.layers.{}.self_attn.q_proj.weight",
)
T5 = ("shared.weight", "encoder.block.{}.layer.0.SelfAttention.q.weight")
WHOLE_T5 = (*T5, "decoder.block.{}.layer.0.SelfAttention.q.weight")
DISTILBERT = ("embeddings.word_embeddings.weight", "transformer.layer.{}.attention.q_lin.weight")
BLOOM = ("word_embeddings.weight", "h.{}.self_attention.dense.weight")
NEOX = ("embed_in.weight", "layers.{}.attention.dense.weight")
HEADED = ("model.embed_tokens.weight", "model.layers.{}.self_attn.q_proj.weight", "lm_head.weight")
PLAIN = ("x_embedder.weight", "blocks.{}.attn.to_q.weight")


@pytest.mark.parametrize("names, architecture, kind", [
    (BERT, "BertModel", "encoder"), (BERT, None, "encoder"), (CLIP, None, "encoder"), (T5, None, "encoder"),
    (T5, "T5EncoderModel", "encoder"), (DISTILBERT, "DistilBertForMaskedLM", "encoder"),
    (WHOLE_T5, None, "language"), (WHOLE_T5, "T5ForConditionalGeneration", "language"), (BLOOM, None, "language"),
    (NEOX, "GPTNeoXForCausalLM", "language"), (HEADED, "SomebodysModel", "language"), (PLAIN, None, "diffusion"),
])  # fmt: skip
def test_what_generates_what_encodes_and_what_samples_are_told_apart(tmp_path, names, architecture, kind):
    tensors = {name.format(layer): torch.zeros(16, 16) for name in names for layer in range(2)}
    save_file(tensors, tmp_path / "m.safetensors")
    if architecture is not None:
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    assert shape_files.read_shape(tmp_path).kind == kind
    assert shape_files.read_shape(tmp_path / "m.safetensors").kind == kind


@pytest.mark.parametrize("architectures", [3, "BertModel", {}, [], [None], [["a"]]])
def test_architectures_of_any_kind_are_read_or_ignored(tmp_path, architectures):
    tiny_llama(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": architectures}))
    assert shape_files.read_shape(tmp_path).kind == "language"


@pytest.mark.parametrize("gated", [False, True])
def test_an_encoders_layers_are_those_that_transformers_builds(gated):
    import transformers

    if gated:
        config = transformers.T5Config(
            d_model=64, d_kv=16, num_heads=4, d_ff=160, num_layers=3, vocab_size=99, feed_forward_proj="gated-gelu"
        )  # fmt: skip
        build = transformers.T5EncoderModel
    else:
        config = transformers.BertConfig(
            hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4, vocab_size=99
        )  # fmt: skip
        build = transformers.BertModel
    with torch.device("meta"):
        model = build(config)
    told = {**config.to_dict(), "architectures": [build.__name__]}
    shape = shape_configs.shape_of_config(told, "config.json")
    built = sum(
        p.numel() for n, p in model.named_parameters()
        if p.dim() == 2 and n.startswith("encoder.") and "embed" not in n and "relative" not in n
    )  # fmt: skip
    assert shape.kind == "encoder" and shape.layers == 3
    assert sum(group.count * group.params for group in shape.groups if group.repeated) == built


def test_a_sharded_folder_and_its_index_are_the_same_shape(tmp_path):
    save_file(
        {"transformer_blocks.0.a.weight": torch.zeros(8, 8), "x_embedder.weight": torch.zeros(8, 2)},
        tmp_path / "m-1.safetensors",
    )
    save_file({"transformer_blocks.1.a.weight": torch.zeros(8, 8)}, tmp_path / "m-2.safetensors")
    index = {
        "weight_map": {
            "transformer_blocks.0.a.weight": "m-1.safetensors",
            "transformer_blocks.1.a.weight": "m-2.safetensors",
        }
    }
    whole = shape_files.read_shape(tmp_path)
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps(index))
    assert shape_files.read_shape(tmp_path / "m.safetensors.index.json").groups == whole.groups
    assert shape_files.read_shape(tmp_path).groups == whole.groups
    assert whole.layers == 2 and whole.kind == "diffusion"


def test_a_diffusers_pipeline_folder_means_its_transformer(tmp_path):
    (tmp_path / "transformer").mkdir()
    save_file(
        {"blocks.0.w": torch.zeros(4, 4), "blocks.1.w": torch.zeros(4, 4)},
        tmp_path / "transformer" / "d.safetensors",
    )
    assert shape_files.read_shape(tmp_path).layers == 2


def test_experts_count_as_active_by_the_share_in_use(tmp_path):
    tensors = {"model.embed_tokens.weight": torch.zeros(10, 8)}
    for layer in range(2):
        for expert in range(4):
            tensors[f"model.layers.{layer}.mlp.experts.{expert}.up.weight"] = torch.zeros(8, 8)
        tensors[f"model.layers.{layer}.attn.q.weight"] = torch.zeros(8, 8)
    save_file(tensors, tmp_path / "m.safetensors")
    assert shape_files.read_shape(tmp_path / "m.safetensors").groups[0].active_params == 64 * 5
    (tmp_path / "config.json").write_text(json.dumps({"num_experts_per_tok": 1}))
    layer = shape_files.read_shape(tmp_path / "m.safetensors").groups[0]
    assert (layer.params, layer.expert_params, layer.active_params) == (64 * 5, 64 * 4, 64 * 2)


def test_a_language_config_gives_the_parameters_transformers_builds():
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=99,
    )
    with torch.device("meta"):
        built = sum(p.numel() for p in transformers.LlamaForCausalLM(config).parameters() if p.dim() == 2)
    assert shape_configs.shape_of_config(config.to_dict(), "config.json").params == built


def test_an_moe_config_gives_the_parameters_transformers_builds():
    import transformers

    config = transformers.Glm4MoeConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        vocab_size=99, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1,
        first_k_dense_replace=1, attention_bias=False, num_nextn_predict_layers=0,
    )  # fmt: skip
    with torch.device("meta"):
        built = sum(p.numel() for p in transformers.Glm4MoeForCausalLM(config).parameters() if p.dim() >= 2)
    shape = shape_configs.shape_of_config(config.to_dict(), "config.json")
    assert shape.params == built
    assert [group.count for group in shape.groups if group.repeated] == [1, 2]


@pytest.mark.parametrize("cls, settings", [
    ("FluxTransformer2DModel", {"num_layers": 2, "num_single_layers": 3, "num_attention_heads": 2, "attention_head_dim": 16}),
    ("Flux2Transformer2DModel", {"num_layers": 2, "num_single_layers": 3, "num_attention_heads": 2, "attention_head_dim": 16}),
    ("QwenImageTransformer2DModel", {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16}),
    ("WanTransformer3DModel", {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 64}),
    ("ZImageTransformer2DModel", {"n_layers": 2, "n_refiner_layers": 1, "dim": 48}),
])  # fmt: skip
def test_a_diffusers_config_gives_the_layers(cls, settings):
    shape = shape_configs.shape_of_config({"_class_name": cls, **settings}, "transformer/config.json")
    assert shape.layers == {"FluxT": 5, "Flux2": 5, "QwenI": 2, "WanTr": 2, "ZImag": 4}[cls[:5]]
    assert shape.name == "transformer"


TINY = {
    "FluxTransformer2DModel": {"num_layers": 2, "num_single_layers": 3, "joint_attention_dim": 32, "pooled_projection_dim": 16, "axes_dims_rope": (4, 4, 8)},
    "Flux2Transformer2DModel": {"num_layers": 2, "num_single_layers": 3, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 4, 4)},
    "QwenImageTransformer2DModel": {"num_layers": 3, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8)},
    "WanTransformer3DModel": {"num_layers": 3, "ffn_dim": 256, "text_dim": 32},
}  # fmt: skip


@pytest.mark.parametrize("cls", TINY)
def test_a_checkpoint_and_its_config_agree_on_layers_and_active_parameters(tmp_path, cls):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")

    model = getattr(diffusers, cls)(num_attention_heads=8, attention_head_dim=16, **TINY[cls]).to(
        torch.bfloat16
    )
    model.save_pretrained(tmp_path)
    read = shape_files.read_shape(tmp_path)
    told = shape_files.read_shape(tmp_path / "config.json")
    assert read.params == sum(p.numel() for p in model.parameters())
    assert read.layers == told.layers and read.hidden == told.hidden
    layers = [[g for g in shape.groups if g.repeated] for shape in (read, told)]
    params, active = (
        [sum(g.count * getattr(g, what) for g in groups) for groups in layers]
        for what in ("params", "active_params")
    )
    assert params[0] == pytest.approx(params[1], rel=0.02)
    assert active[0] == pytest.approx(active[1], rel=0.02)


def test_packed_four_bit_weights_count_two_to_a_byte(tmp_path):
    tensors = {
        "layers.0.q.weight": torch.zeros(128, 1, dtype=torch.uint8),
        "layers.0.q.weight.absmax": torch.zeros(4),
    }
    save_file(tensors, tmp_path / "m.safetensors")
    layer = shape_files.read_shape(tmp_path / "m.safetensors").groups[0]
    assert layer.active_params == 256 and layer.stored_bytes == 128 + 16


def test_a_file_without_matrices_is_a_weights_error(tmp_path):
    save_file({"layers.0.bias": torch.zeros(8)}, tmp_path / "m.safetensors")
    with pytest.raises(WeightsError, match="nothing to plan"):
        shape_files.read_shape(tmp_path / "m.safetensors")


def header_file(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
HOSTILE = {
    "not an object": [1, 2],
    "not JSON": b"{\"a\": ",
    "deeply nested": b"[" * 100_000,
    "no tensors": {},
    "entry is a list": {"a": [1]},
    "unknown dtype": {"a": {**GOOD, "dtype": "PICKLE"}},
    "dtype is a list": {"a": {**GOOD, "dtype": ["F32"]}},
    "negative dimension": {"a": {**GOOD, "shape": [-2, -2]}},
    "boolean dimension": {"a": {**GOOD, "shape": [True, 4]}},
    "huge dimension": {"a": {**GOOD, "shape": [1 << 62, 1 << 62]}},
    "float dimension": {"a": {**GOOD, "shape": [2.0, 2]}},
    "shape is a string": {"a": {**GOOD, "shape": "22"}},
    "offsets beyond the file": {"a": {**GOOD, "shape": [200, 200], "data_offsets": [0, 160_000]}},
    "offsets backwards": {"a": {**GOOD, "data_offsets": [16, 0]}},
    "negative offset": {"a": {**GOOD, "data_offsets": [-16, 0]}},
    "three offsets": {"a": {**GOOD, "data_offsets": [0, 8, 16]}},
    "length is not shape times dtype": {"a": {**GOOD, "data_offsets": [0, 12]}},
    "number with ten thousand digits": b'{"a": {"dtype": "F32", "shape": [' + b"9" * 10_000 + b'], "data_offsets": [0, 16]}}',
}  # fmt: skip


@pytest.mark.parametrize("header", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_header_is_a_weights_error(tmp_path, header):
    with pytest.raises(WeightsError):
        shape_files.read_shape(header_file(tmp_path / "bad.safetensors", header, bytes(16)))


def test_a_header_longer_than_the_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "bad.safetensors"
    for length in (1 << 63, 100_000_001, 50):
        path.write_bytes(struct.pack("<Q", length) + b"{}")
        with pytest.raises(WeightsError, match="header cannot be"):
            shape_files.read_shape(path)


@pytest.mark.parametrize("size", [0, 3, 8, 100])
def test_a_truncated_file_is_a_weights_error(tmp_path, size):
    path = tiny_llama(tmp_path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(WeightsError):
        shape_files.read_shape(path)


def test_a_truncated_body_is_a_weights_error(tmp_path):
    path = tiny_llama(tmp_path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(WeightsError, match="truncated: tensor '.*the file holds"):
        shape_files.read_shape(path)


@pytest.mark.parametrize("quant", [None, "nf4"])
def test_a_packed_file_has_the_shape_of_what_it_unpacks_to(tmp_path, quant):
    width = 128
    layer = {
        "self_attn.q_proj.weight": (width, width),
        "mlp.up_proj.weight": (4 * width, width),
        "norm.weight": (width,),
    }
    plain, packed = tmp_path / "plain.safetensors", tmp_path / "packed.safetensors"
    save_file(
        {f"model.layers.{i}.{name}": torch.randn(shape).bfloat16() for i in range(3) for name, shape in layer.items()},
        plain,
    )  # fmt: skip
    report = pack(plain, packed, codec="lossless", quant=quant and parse_scheme(quant), device="cpu")
    assert set(report.codecs) - {"raw"}
    assert shape_files.read_header(packed) == shape_files.read_header(plain)
    assert shape_files.read_shape(packed).layers == 3


@pytest.mark.parametrize(
    "entry", ["{", "[]", '{"tensors": 3}', '{"tensors": {"a": 3}}', "[" * 100_000,
              '{"tensors": {"a": {"dtype": "bfloat16", "shape": [-1]}}}', '{"tensors": {"a": {"dtype": [], "shape": [1]}}}'],
)  # fmt: skip
def test_a_bad_description_of_packed_tensors_is_a_weights_error(tmp_path, entry):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(4, 4)}, path, metadata={"carom.codec": entry})
    with pytest.raises(WeightsError, match="packed tensor"):
        shape_files.read_header(path)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt", ".pkl"])
def test_a_pickle_is_never_opened(tmp_path, suffix, monkeypatch):
    path = tmp_path / f"model{suffix}"
    path.write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    monkeypatch.setattr("builtins.open", lambda *a, **k: pytest.fail("opened"))
    with pytest.raises(WeightsError, match="pickle"):
        shape_files.read_shape(path)


def test_a_pickle_named_safetensors_is_a_weights_error(tmp_path):
    path = tmp_path / "model.safetensors"
    torch.save({"a": torch.zeros(100)}, path)
    with pytest.raises(WeightsError):
        shape_files.read_shape(path)


@pytest.mark.parametrize("shard", ["../m.safetensors", "/etc/passwd", "a/b.safetensors", "m.bin", 7])
def test_an_index_may_not_name_files_elsewhere(tmp_path, shard):
    tiny_llama(tmp_path, "m.safetensors")
    (tmp_path / "sub").mkdir()
    path = tmp_path / "sub" / "x.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(WeightsError):
        shape_files.read_shape(path)


def test_a_missing_shard_is_named(tmp_path):
    path = tmp_path / "x.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(WeightsError, match="gone.safetensors"):
        shape_files.read_shape(path)


@pytest.mark.parametrize("config", [
    {}, [], {"hidden_size": -1}, {"hidden_size": 64, "num_hidden_layers": 0, "num_attention_heads": 4, "intermediate_size": 4},
    {"hidden_size": 64, "num_hidden_layers": 10**9, "num_attention_heads": 4, "intermediate_size": 4},
    {"hidden_size": "64", "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 4},
    {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 0, "intermediate_size": 4},
    {"_class_name": "FluxTransformer2DModel", "num_layers": 10**12},
])  # fmt: skip
def test_a_bad_config_is_a_weights_error(tmp_path, config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(WeightsError):
        shape_files.read_shape(path)


def test_an_unknown_diffusers_class_says_what_to_give_instead():
    with pytest.raises(UnsupportedError, match="safetensors file or folder"):
        shape_configs.shape_of_config({"_class_name": "NewTransformer"}, "config.json")


def test_an_empty_folder_and_an_absent_file_are_weights_errors(tmp_path):
    for path in (tmp_path, tmp_path / "gone.safetensors"):
        with pytest.raises(WeightsError):
            shape_files.read_shape(path)


def test_an_oversized_json_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(shape_files, "MAX_JSON", 100)
    path = tmp_path / "x.index.json"
    path.write_text(json.dumps({"weight_map": {f"t{i}": "a.safetensors" for i in range(50)}}))
    with pytest.raises(WeightsError, match="larger"):
        shape_files.read_shape(path)


KEYS = ["_class_name", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "intermediate_size", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts",
        "first_k_dense_replace", "vocab_size", "tie_word_embeddings", "num_layers", "num_single_layers", "attention_head_dim",
        "ffn_dim", "dim", "n_layers", "n_refiner_layers", "text_config"]  # fmt: skip
CLASSES = ["FluxTransformer2DModel", "Flux2Transformer2DModel", "QwenImageTransformer2DModel", "WanTransformer3DModel", "ZImageTransformer2DModel"]  # fmt: skip
values = st.one_of(
    st.integers(-2, 200),
    st.integers(),
    st.none(),
    st.text(max_size=3),
    st.booleans(),
    st.floats(),
    st.sampled_from(CLASSES),
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), values, max_size=len(KEYS)))
def test_any_config_is_planned_or_refused_by_one_of_our_errors(tmp_path, config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    try:
        shape = shape_files.read_shape(path)
        plan = paper_plan.plan(shape, Machine(presets.CARDS["rtx4090"], ram=64 << 30), Job("train"))
    except CaromError:
        return
    json.dumps(paper_plan.to_dict(plan), allow_nan=False)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 255))
def test_any_damage_to_a_file_is_read_or_refused_as_weights_error(tmp_path, noise, at, byte):
    path = tmp_path / "m.safetensors"
    if not path.exists():
        tiny_llama(tmp_path, path.name)
        (tmp_path / "good").write_bytes(path.read_bytes())
    data = bytearray((tmp_path / "good").read_bytes())
    data[at : at + len(noise)] = noise
    data[(at * 7) % 300] = byte
    path.write_bytes(data)
    with contextlib.suppress(WeightsError):
        assert shape_files.read_shape(path).params < 1 << 40
