"""Names of a checkpoint to a module's parameters and buffers: what fits is found, what does not is named."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from carom.core.checkpoint.disk_reader import DiskReader
from carom.core.checkpoint.index import open_index
from carom.core.checkpoint.mapping import match_module
from carom.core.checkpoint.segments import FUSED
from carom.core.common.errors import UnsupportedError, WeightsError
from safetensors.torch import save_file
from torch import nn


class Attention(nn.Module):
    """8 wide, with fewer rows for keys and values, fused or not."""

    def __init__(self, fused: bool, bias: bool = True) -> None:
        super().__init__()
        if fused:
            self.qkv_proj = nn.Linear(8, 16, bias=bias)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, n, bias=bias) for n in (8, 4, 4))


class Model(nn.Module):
    def __init__(self, fused: bool = False, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(Attention(fused) for _ in range(2))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.register_buffer("table", torch.arange(6.0), persistent=False)
        if tied:
            self.head.weight = self.embed.weight


def write(folder: Path, values: dict[str, torch.Tensor], prefix: str = ""):
    path = folder / "m.safetensors"
    save_file({prefix + k: v.clone().contiguous() for k, v in values.items()}, path)
    return open_index(path)


def fill(module: nn.Module, found) -> None:
    """Read every bound tensor from the file and put it in place; the mapping's own words decide where."""
    with DiskReader() as reader:
        for item in found.bound.values():
            raw = torch.full((item.nbytes,), 0xA5, dtype=torch.uint8)
            at = 0
            for segment in item.segments:
                assert segment.at == at, "segments follow one another"
                reader.submit(segment.entry, raw[at:], start=segment.start, nbytes=segment.nbytes).result(20)
                at += segment.nbytes
            assert at == item.nbytes
            value = raw.view(item.dtype).reshape(item.shape)
            for name in item.names:
                owner = module.get_submodule(name.rpartition(".")[0])
                leaf = name.rpartition(".")[2]
                if item.is_buffer:
                    owner._buffers[leaf] = value
                else:
                    owner._parameters[leaf] = nn.Parameter(value)


def equal(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize("prefix", ["", "model.", "model.diffusion_model.", "odd.one.7."])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_every_value_arrives_whatever_the_prefix(prefix: str, device: str, tmp_path: Path):
    torch.manual_seed(0)
    true = Model()
    values = {k: v for k, v in true.state_dict().items() if k != "head.weight"}
    index = write(tmp_path, values, prefix)
    with torch.device(device):
        module = Model()
    found = match_module(module, index)
    assert found.prefix == prefix and not found.extra
    assert found.bound["embed.weight"].names == ("embed.weight", "head.weight")
    assert (found.computed if device == "meta" else found.kept) == ("table",)
    fill(module, found)
    assert equal(module, true)


def test_module_that_wraps_what_the_file_holds(tmp_path: Path):
    true = Model(tied=False)
    index = write(tmp_path, true.state_dict())
    with torch.device("meta"):
        outer = nn.Module()
        outer.inner = Model(tied=False)
    found = match_module(outer, index)
    assert found.prefix == "+inner." and not found.extra
    fill(outer, found)
    assert equal(outer.inner, true)


@pytest.mark.parametrize("in_file, in_module", [(True, False), (False, True)])
def test_fused_rows_are_cut_and_joined(in_file: bool, in_module: bool, tmp_path: Path):
    torch.manual_seed(0)
    true = Model(fused=in_file)
    with torch.device("meta"):
        module = Model(fused=in_module)
    found = match_module(module, write(tmp_path, true.state_dict()))
    assert set(found.extra) <= {"head.weight"}
    fill(module, found)
    for mine, theirs in zip(module.layers, true.layers, strict=True):
        for kind in ("weight", "bias"):
            split, fused = (theirs, mine) if in_module else (mine, theirs)
            parts = [getattr(getattr(split, f"{p}_proj"), kind) for p in "qkv"]
            assert torch.equal(torch.cat(parts), getattr(fused.qkv_proj, kind))


def test_fused_rules_name_each_part_once():
    assert all(len(set(parts)) == len(parts) > 1 and fused not in parts for fused, parts in FUSED)


@pytest.mark.parametrize("change", ["rows", "width", "dtype", "absent"])
def test_fused_parts_that_do_not_add_up_are_not_joined(change: str, tmp_path: Path):
    values = Model(fused=False).state_dict()
    name = "layers.1.k_proj.weight"
    if change == "absent":
        del values[name]
    else:
        values[name] = {
            "rows": torch.zeros(5, 8), "width": torch.zeros(4, 9), "dtype": torch.zeros(4, 8).half()
        }[change]  # fmt: skip
    with torch.device("meta"):
        module = Model(fused=True)
    with pytest.raises(WeightsError, match=r"lacks 1 tensors of the module: 'layers.1.qkv_proj.weight'"):
        match_module(module, write(tmp_path, values))


def test_stacked_experts_are_joined_unless_they_might_be_transposed(tmp_path: Path):
    class Experts(nn.Module):
        def __init__(self, rows: int, width: int) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(3, 2 * rows, width))
            self.down_proj = nn.Parameter(torch.zeros(3, width, rows))

    def build(rows: int, width: int) -> nn.Module:
        module = nn.Module()
        module.experts = Experts(rows, width)
        return module.to("meta")

    def file(rows: int, width: int) -> dict[str, torch.Tensor]:
        found = {}
        for i in range(3):
            found[f"experts.{i}.gate_proj.weight"] = torch.randn(rows, width)
            found[f"experts.{i}.up_proj.weight"] = torch.randn(rows, width)
            found[f"experts.{i}.down_proj.weight"] = torch.randn(width, rows)
        return found

    values, module = file(6, 4), build(6, 4)
    found = match_module(module, write(tmp_path, values))
    assert not found.extra
    fill(module, found)
    for i in range(3):
        parts = [values[f"experts.{i}.{k}_proj.weight"] for k in ("gate", "up")]
        assert torch.equal(module.experts.gate_up_proj[i], torch.cat(parts))
        assert torch.equal(module.experts.down_proj[i], values[f"experts.{i}.down_proj.weight"])
    with pytest.raises(WeightsError, match="'experts.gate_up_proj'"):
        match_module(build(2, 4), write(tmp_path, file(2, 4)))


def test_missing_and_extra_names_are_told(tmp_path: Path):
    values = Model().state_dict()
    values["surprise"] = torch.zeros(1)
    del values["layers.0.q_proj.bias"], values["norm.running_mean"]
    index = write(tmp_path, values)
    with torch.device("meta"):
        module = Model()
    with pytest.raises(WeightsError, match="lacks 2 tensors.*q_proj.bias.*running_mean.*'surprise'"):
        match_module(module, index)
    found = match_module(Model(), index)  # one that holds values keeps them
    assert set(found.kept) == {"layers.0.q_proj.bias", "norm.running_mean", "table"}
    assert found.extra == ("surprise",)


def test_wrong_shapes_and_dtypes_are_named_together(tmp_path: Path):
    values = Model().state_dict()
    values["layers.0.q_proj.weight"] = torch.zeros(8, 9)
    values["norm.weight"] = torch.zeros(8).half()
    index = write(tmp_path, values)
    with torch.device("meta"):
        module = Model()
    with pytest.raises(
        WeightsError,
        match=r"2 tensors differ.*q_proj.weight has shape \[8, 8\].*\[8, 9\].*norm.weight is torch.float32.*torch.float16",
    ):
        match_module(module, index)
    values["layers.0.q_proj.weight"] = torch.zeros(8, 8)
    index = write(tmp_path, values)
    assert match_module(module, index, adopt_dtype=True).bound["norm.weight"].dtype == torch.float16
    with pytest.raises(WeightsError, match="1 tensors differ"):
        match_module(Model(), index, adopt_dtype=True)


def test_same_count_in_another_shape_is_wrong(tmp_path: Path):
    values = Model().state_dict()
    values["layers.0.q_proj.weight"] = torch.zeros(4, 16)
    with pytest.raises(WeightsError, match="has shape"):
        match_module(Model(), write(tmp_path, values))


def test_another_models_file_is_refused(tmp_path: Path):
    index = write(tmp_path, {"foo": torch.zeros(3), "bar.baz": torch.zeros(3)})
    with torch.device("meta"):
        module = Model()
    for candidate in (module, Model()):
        with pytest.raises(WeightsError, match="none of its 2 tensors fits.*'foo'"):
            match_module(candidate, index)
    with pytest.raises(WeightsError, match="none of its 0 tensors"):
        match_module(module, write(tmp_path, {}))


def test_two_prefixes_that_fit_alike_ask_which(tmp_path: Path):
    state = Model().state_dict()
    both = {f"{p}.{k}": v for p in ("ema", "live") for k, v in state.items()}
    index = write(tmp_path, both)
    with pytest.raises(WeightsError, match="several prefixes.*'ema.'.*'live.'"):
        match_module(Model(), index)
    found = match_module(Model(), index, prefix="live.")
    assert found.bound["norm.weight"].segments[0].entry.name == "live.norm.weight"
    assert len(found.extra) == len(state)


def test_known_prefix_wins_over_an_unknown_one(tmp_path: Path):
    state = Model().state_dict()
    index = write(
        tmp_path, {f"{p}.{k}": v for p in ("model_ema", "model.diffusion_model") for k, v in state.items()}
    )
    assert match_module(Model(), index).prefix == "model.diffusion_model."


def test_names_that_wrappers_add_are_seen_through(tmp_path: Path):
    from peft import LoraConfig, get_peft_model

    true = Model(tied=False)
    index = write(tmp_path, true.state_dict())
    wrapped = get_peft_model(Model(tied=False), LoraConfig(target_modules=["q_proj"], r=2))
    found = match_module(wrapped, index)
    assert not found.extra
    assert "base_model.model.layers.0.q_proj.base_layer.weight" in found.bound
    assert all("lora_" in n or n.endswith("table") for n in found.kept)


def test_rename_maps_what_no_rule_knows(tmp_path: Path):
    index = write(tmp_path, {k.replace("layers", "blocks"): v for k, v in Model().state_dict().items()})
    found = match_module(Model(), index, rename=lambda n: n.replace("layers", "blocks"))
    assert not found.extra and found.kept == ("table",)


def test_codecs_without_raw_bytes_are_refused(tmp_path: Path):
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(1)}, path, {"carom.pack": '{"codec":"lossless"}'})
    with pytest.raises(UnsupportedError, match="lossless"):
        match_module(nn.Linear(1, 1), open_index(path))


@pytest.mark.parametrize("tie", [True, False])
def test_transformers_llama_on_meta_from_a_sharded_folder(tie: bool, tmp_path: Path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=1, vocab_size=30, tie_word_embeddings=tie)  # fmt: skip
    torch.manual_seed(0)
    true = LlamaForCausalLM(config).eval()
    true.save_pretrained(tmp_path, max_shard_size="8KB")
    index = open_index(tmp_path)
    assert len(index.files) > 2
    with torch.device("meta"):
        module = LlamaForCausalLM(config).eval()
    found = match_module(module, index)
    assert not found.extra and not found.kept
    assert all("inv_freq" in name for name in found.computed)
    fill(module, found)
    for name in found.computed:
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._buffers[leaf] = true.get_buffer(name)
    ids = torch.arange(9)[None]
    assert torch.equal(module(ids).logits, true(ids).logits)


HUB = {
    "OlmoeSquare": ("0.gate_proj", {"num_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 8}),
    "Mixtral": (
        "block_sparse_moe",
        {"num_local_experts": 2, "intermediate_size": 20, "num_key_value_heads": 1},
    ),
    "GPTNeoX": ("embed_out", {"intermediate_size": 40, "tie_word_embeddings": False}),
}


@pytest.mark.parametrize("kind", HUB)
@pytest.mark.parametrize("meta", [True, False], ids=["meta", "values"])
def test_files_that_keep_the_names_of_their_first_release_fit_as_transformers_loads_them(
    kind, meta, tmp_path
):
    transformers = pytest.importorskip("transformers")
    old, settings = HUB[kind]
    kind = kind.removesuffix("Square")  # its experts' stack holds square matrices
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 30}
    config = getattr(transformers, f"{kind}Config")(**sizes, **settings)
    make = getattr(transformers, f"{kind}ForCausalLM")
    true = make(config).eval()
    true.save_pretrained(tmp_path)
    index = open_index(tmp_path)
    if not any(old in name for name in index):
        pytest.skip("this transformers writes the module's own names")
    with torch.device("meta" if meta else "cpu"):
        module = make(config).eval()
    found = match_module(module, index)
    assert not found.extra and all("inv_freq" in name for name in found.kept)
    fill(module, found)
    assert all(torch.equal(value, true.get_parameter(name)) for name, value in module.named_parameters())
    with pytest.raises(WeightsError, match=old):  # who says how names are to be read is not overruled
        match_module(make(config).to("meta"), index, rename=lambda name: name)


def test_tensors_that_transformers_would_rearrange_are_refused(tmp_path, monkeypatch):
    tables = pytest.importorskip("transformers.conversion_mapping")
    loading = pytest.importorskip("transformers.core_model_loading")
    from transformers import BertConfig, BertModel

    module = BertModel(
        BertConfig(
            hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2, vocab_size=20
        )
    )
    index = write(tmp_path, module.state_dict())
    match_module(module, index)
    turned = loading.WeightConverter("query.weight", "query.weight", [loading.Transpose(0, 1)])
    monkeypatch.setattr(tables, "get_model_conversion_mapping", lambda model: [turned])
    with pytest.raises(UnsupportedError, match=r"rearranges '.*query\.weight'.*save"):
        match_module(module, index)


def test_a_transformers_without_tables_is_asked_for_its_models_patterns(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    hub = importlib.import_module("carom.core.checkpoint.hub_names")
    monkeypatch.setattr(hub, "_TABLES", "transformers.no_such_tables")

    class Old(transformers.PreTrainedModel):
        _checkpoint_conversion_mapping = {r"^visual\.": "model.visual."}

        def __init__(self) -> None:
            super().__init__(transformers.PretrainedConfig())
            self.model = nn.Module()
            self.model.visual, self.model.head = nn.Linear(4, 4), nn.Linear(4, 2)

    true = Old()
    names = {n.replace("model.visual.", "visual."): t for n, t in true.state_dict().items()}
    with torch.device("meta"):
        module = Old()
    found = match_module(module, write(tmp_path, names))
    assert not found.extra and len(found.bound) == 4
    monkeypatch.setattr(Old, "_checkpoint_conversion_mapping", {"(": "broken"})
    with pytest.raises(WeightsError, match=r"model\.visual"):
        match_module(module, open_index(tmp_path / "m.safetensors"))


def test_matching_names_imports_nothing_of_transformers(package, tmp_path):
    write(tmp_path, nn.Linear(4, 4).state_dict())
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import transformers, torch;"
        "from carom.core.checkpoint.index import open_index; from carom.core.checkpoint.mapping import match_module;"
        "assert len(match_module(torch.nn.Linear(4, 4), open_index(sys.argv[2])).bound) == 2;"
        "assert 'transformers.modeling_utils' not in sys.modules"
    )
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, "-c", code, str(package), str(tmp_path / "m.safetensors")],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_base_model_from_a_full_checkpoint_and_the_other_way(tmp_path: Path):
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    config = BertConfig(
        hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2, vocab_size=20
    )
    full = BertForSequenceClassification(config)
    found = match_module(BertModel(config), write(tmp_path, full.state_dict()))
    assert found.prefix == "bert." and set(found.extra) == {"classifier.weight", "classifier.bias"}
    base = write(tmp_path, BertModel(config).state_dict())
    found = match_module(full, base)
    assert found.prefix == "+bert." and not found.extra
    assert {"classifier.weight", "classifier.bias"} <= set(found.kept)
