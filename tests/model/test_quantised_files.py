"""Modules on meta whose weights a library quantised stream from the library's own checkpoint files."""

from __future__ import annotations

import contextlib
import importlib
import io
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import carom
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests_disk_harness import Drive, within_ram
from tests_harness import SOME, assert_same, place, train
from tests_pairwise import pairwise
from torch import nn

D, BLOCKS = 256, 3
RAM = 8192  # bytes: the least that reading works with


class Block(nn.Module):
    def __init__(self, make: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), make(D, 4 * D), make(4 * D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, make: Callable[[int, int], nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(make) for _ in range(BLOCKS))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    @staticmethod
    def inputs(index: int, device: torch.device) -> torch.Tensor:
        return torch.randn(2, 3, D, generator=torch.Generator().manual_seed(index)).to(device)


class Lora(nn.Module):
    def __init__(self, base: nn.Module, out: int, inside: int, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.base = base
        self.a = nn.Parameter(torch.randn(2, inside, generator=draw) * 0.1)
        self.b = nn.Parameter(torch.randn(out, 2, generator=draw) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


def with_adapters(net: Net) -> Net:
    for index, block in enumerate(net.blocks):
        block.up = Lora(block.up, 4 * D, D, index)
    return net


class Fp8Linear(nn.Linear):
    """Codes in fp8 with a scale for each row, as checkpoints name them: `weight` and `weight_scale`."""

    def __init__(self, inside: int, out: int) -> None:
        super().__init__(inside, out)
        self.weight = nn.Parameter(torch.empty(out, inside, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.empty(out, 1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.weight_scale, self.bias)


def library(name: str) -> Any:
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - libraries fail to import in many ways
        pytest.skip(f"{name} does not import here: {type(error).__name__}: {str(error)[:100]}")


def plain() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Net().eval()


@dataclass(frozen=True)
class Kind:
    """A format of files. ``layer``: the linear layer of a module on meta. ``save``: writes the quantised file.
    ``load``: makes the module in memory as the library does.
    """

    layer: Callable[[], Callable[[int, int], nn.Module]]
    save: Callable[[Path], None]
    load: Callable[[Path], Net]

    def on_meta(self) -> Net:
        with torch.device("meta"):
            return Net(self.layer()).eval()


def nf4(double: bool = True) -> Kind:
    def layer() -> Callable[[int, int], nn.Module]:
        module = library("bitsandbytes").nn
        return lambda inside, out: module.Linear4bit(
            inside,
            out,
            quant_type="nf4",
            compute_dtype=torch.float32,
            compress_statistics=double,
            device=torch.get_default_device(),
        )

    return Kind(layer, lambda path: save_bitsandbytes(layer(), path), lambda path: load_4bit(layer(), path))


def save_bitsandbytes(layer: Any, path: Path) -> None:
    net = Net(layer)
    net.load_state_dict(plain().state_dict())
    net = net.to("cpu").requires_grad_(False)
    save_file({name: value.contiguous().clone() for name, value in net.state_dict().items()}, path)


def load_4bit(layer: Any, path: Path) -> Net:
    net, state = Net(layer).eval(), load_file(path)
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear):
            prefix = f"{name}.weight."
            stats = {key[len(prefix) :]: state.pop(key) for key in list(state) if key.startswith(prefix)}
            module.weight = type(module.weight).from_prequantized(
                data=state.pop(f"{name}.weight"), quantized_stats=stats, device="cpu", module=module
            )
    net.load_state_dict(state, strict=False)
    return net.requires_grad_(False)


def int8() -> Kind:
    def layer() -> Callable[[int, int], nn.Module]:
        module = library("bitsandbytes").nn
        return lambda inside, out: module.Linear8bitLt(
            inside, out, has_fp16_weights=False, device=torch.get_default_device()
        )

    def load(path: Path) -> Net:
        net, state = Net(layer()).eval(), load_file(path)
        for name, module in net.named_modules():
            if isinstance(module, nn.Linear):
                module.weight = type(module.weight)(
                    state.pop(f"{name}.weight"),
                    requires_grad=False,
                    has_fp16_weights=False,
                    SCB=state.pop(f"{name}.SCB"),
                ).to("cpu")
                state.pop(f"{name}.weight_format")
        net.load_state_dict(state, strict=False)
        return net.requires_grad_(False)

    return Kind(layer, lambda path: save_bitsandbytes(layer(), path), load)


def torchao(config: str) -> Kind:
    def save(path: Path) -> None:
        api = library("torchao.quantization")
        support = library("torchao.prototype.safetensors.safetensors_support")
        net = plain()
        api.quantize_(net, getattr(api, config)())
        state = {
            name: value.data if "Tensor" in type(value.data).__name__[1:] else value.detach()
            for name, value in net.state_dict(keep_vars=True).items()
        }
        tensors, metadata = support.flatten_tensor_state_dict(state)
        save_file(tensors, path, metadata=metadata)

    def load(path: Path) -> Net:
        support = library("torchao.prototype.safetensors.safetensors_support")
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        state, left = support.unflatten_tensor_state_dict(load_file(path), metadata)
        net = Net().eval()
        net.load_state_dict({**state, **left}, assign=True)
        return net.requires_grad_(False)

    return Kind(lambda: nn.Linear, save, load)


def fp8() -> Kind:
    def save(path: Path) -> None:
        state: dict[str, torch.Tensor] = {}
        for name, value in plain().state_dict().items():
            if name.endswith("weight") and value.ndim == 2:
                scale = value.abs().amax(1, keepdim=True) / 448
                state[f"{name}_scale"], value = scale, (value / scale).to(torch.float8_e4m3fn)
            state[name] = value
        save_file(state, path)

    def load(path: Path) -> Net:
        net = Net(Fp8Linear).eval()
        net.load_state_dict(load_file(path), assign=True)
        return net.requires_grad_(False)

    return Kind(lambda: Fp8Linear, save, load)


KINDS = {
    "bitsandbytes nf4": nf4(),
    "bitsandbytes nf4, one level": nf4(double=False),
    "bitsandbytes int8": int8(),
    "torchao int8": torchao("Int8WeightOnlyConfig"),
    "torchao float8": torchao("Float8WeightOnlyConfig"),
    "fp8 with scales": fp8(),
}
BITSANDBYTES = [name for name in KINDS if name.startswith("bitsandbytes")]


@pytest.fixture
def files(tmp_path: Path) -> Callable[[str], Path]:
    def saved(kind: str) -> Path:
        path = tmp_path / "model.safetensors"
        KINDS[kind].save(path)
        return path

    return saved


def infer(net: Net, where: torch.device) -> list[torch.Tensor]:
    with torch.no_grad():
        return [net(Net.inputs(index, where)) for index in range(3)]


def trained(net: Net, where: torch.device) -> list:
    """All that training shows; not the buffers, which inner tensors are meanwhile."""
    seen = train(net, Net, where)
    return seen[: len(seen) - len(list(net.buffers()))]


def least(kind: str, path: Path, device: Any) -> int:
    with pytest.raises(carom.BudgetError) as refused:
        carom.stream(KINDS[kind].on_meta(), device=device, vram=0, ram=RAM, weights=path)
    assert refused.value.least_bytes is not None
    return refused.value.least_bytes


def reachable(kind: str, device: Any) -> torch.device:
    where = place(device)
    if where.type != "cpu" and kind == "bitsandbytes int8":
        pytest.skip(
            "the scales of int8 layers stay where they were, so nothing runs resident to compare with"
        )
    return where


# -- exact


@pairwise(kind=list(KINDS), device=SOME)
def test_a_module_on_meta_computes_as_the_one_that_its_library_loads(files, kind, device):
    where, path = reachable(kind, device), files(kind)
    expected = infer(KINDS[kind].load(path).to(where), where)
    net = KINDS[kind].on_meta()
    own = [block.up.weight for block in net.blocks]
    budget = 2 * least(kind, path, device)
    for _ in range(2):  # the module is as it was, and streams again
        with carom.stream(net, device=device, vram=budget, ram=RAM, weights=path) as session:
            assert_same(expected, infer(net, where))
            within_ram(session)
            need = (
                session.report().resident_by_need
            )  # the offset of nested scales is a number in the file's JSON
            assert [entry for entry in need if "weight" in entry.name and entry.nbytes > 4] == []
        assert all(block.up.weight is weight for block, weight in zip(net.blocks, own, strict=True))
        assert all(weight.is_meta for weight in own)


@pairwise(kind=BITSANDBYTES, device=SOME)
def test_lora_over_a_quantised_file_trains_as_over_the_loaded_module(files, kind, device):
    where, path = reachable(kind, device), files(kind)
    loaded = with_adapters(KINDS[kind].load(path)).to(where)
    expected = trained(loaded, where)
    net = KINDS[kind].on_meta()
    with carom.stream(net, device=device, vram=4 * least(kind, path, device), ram=RAM, weights=path):
        found = trained(with_adapters(net), where)
    assert_same(expected, found)


@pytest.mark.parametrize("kind", KINDS)
def test_names_may_differ_by_a_prefix(files, kind):
    path = files(kind)
    expected = infer(KINDS[kind].load(path), torch.device("cpu"))
    outer = nn.ModuleDict({"model": KINDS[kind].on_meta()})
    with carom.stream(outer, device="cpu", vram="1MiB", ram=RAM, weights=path):
        assert_same(expected, infer(outer["model"], torch.device("cpu")))


# -- what is read


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_is_read_once_and_stays_quantised_in_ram(files, kind, monkeypatch):
    path = files(kind)
    net, ram = KINDS[kind].on_meta(), 2 * path.stat().st_size
    vram = least(kind, path, "cpu")
    drive = Drive(monkeypatch)
    with carom.stream(net, device="cpu", vram=vram, ram=ram, weights=path) as session:
        infer(net, torch.device("cpu"))
        # direct reads begin and end at multiples of 4096 bytes; a block of the model has at most 16 tensors
        size = path.stat().st_size
        assert 0.9 * size < drive.fresh() < size + 4096 * 16 * BLOCKS
        infer(net, torch.device("cpu"))
        assert drive.fresh() == 0
        report = session.report()
        assert report.raw_bytes_per_step is not None
        assert 0.5 * size < report.raw_bytes_per_step < size, "most of the file streams as it is"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc/self/smaps_rollup is Linux's")
def test_memory_is_not_allocated_for_the_file(tmp_path):
    library("bitsandbytes")
    script = """
        import sys, torch, bitsandbytes, carom
        from torch import nn
        from safetensors.torch import save_file
        SIZE, LAYERS = 2048, 32  # 2 MiB of codes for each layer

        def build():
            return nn.Sequential(*(bitsandbytes.nn.Linear4bit(
                SIZE, SIZE, bias=False, quant_type="nf4", compute_dtype=torch.float32) for _ in range(LAYERS)))

        def private():
            lines = open("/proc/self/smaps_rollup").read().splitlines()
            return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) << 10

        with torch.device("meta"):
            net = build().requires_grad_(False)
        one = bitsandbytes.nn.Linear4bit(SIZE, SIZE, bias=False, quant_type="nf4").to("cpu")
        state = one.state_dict()
        path = sys.argv[1]
        save_file({f"{i}.{n}": t.clone() for i in range(LAYERS) for n, t in state.items()}, path)
        x = torch.ones(1, SIZE)
        with torch.no_grad():
            one(x)
        del one, state
        before = private()
        with carom.stream(net, device="cpu", vram="10MiB", ram="4MiB", weights=path), torch.no_grad():
            attached = private() - before
            net(x); net(x)
        print(attached >> 20)
    """
    path = tmp_path / "model.safetensors"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert path.stat().st_size > 64 << 20
    assert int(done.stdout.split()[-1]) < 40, "the slots, the cache and no copy of the file"


# -- bad input


def rewritten(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """Write the file again after ``change`` of its tensors."""
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    change(tensors)
    save_file(tensors, path, metadata=metadata)
    return path


PART = {
    "bitsandbytes nf4": "blocks.1.up.weight.absmax",
    "bitsandbytes int8": "blocks.1.up.SCB",
    "torchao int8": "blocks.1.up._weight_scale",
}
on_damaged = pytest.mark.parametrize("kind", PART)


def refused(kind: str, path: Path, error: type[Exception], match: str) -> None:
    net = KINDS[kind].on_meta()
    before = [(id(p), p.is_meta, p.requires_grad) for p in net.parameters()]
    with pytest.raises(error, match=match):
        carom.stream(net, device="cpu", vram="1MiB", ram=RAM, weights=path)
    assert [(id(p), p.is_meta, p.requires_grad) for p in net.parameters()] == before
    assert all(getattr(m, "quant_state", None) is None for m in net.modules())


@on_damaged
def test_a_missing_part_is_named(files, kind):
    path = rewritten(files(kind), lambda tensors: tensors.pop(PART[kind]))
    refused(kind, path, carom.WeightsError, r"blocks\.1\.up\.weight")


@on_damaged
def test_a_part_of_the_wrong_size_is_named(files, kind):
    def shorten(tensors: dict[str, torch.Tensor]) -> None:
        tensors[PART[kind]] = tensors[PART[kind]][:-1].clone()

    refused(kind, rewritten(files(kind), shorten), carom.WeightsError, r"blocks\.1\.up\.weight.*elements")


@on_damaged
def test_another_shape_than_the_modules_is_named(files, kind):
    path = files(kind)

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if name.startswith("blocks.1.down."):
                other = name.replace(".down.", ".up.")
                tensors[name], tensors[other] = tensors[other], tensors[name]
        for leaf in ("up.bias", "down.bias"):  # the biases fit, so that the weights are what differs
            tensors[f"blocks.1.{leaf}"] = tensors[f"blocks.0.{leaf}"].clone()

    refused(kind, rewritten(path, swap), carom.WeightsError, r"blocks\.1\.(up|down)\.weight.*shape")


@on_damaged
def test_a_truncated_file_is_refused(files, kind):
    path = files(kind)
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 100)
    refused(kind, path, carom.WeightsError, "model.safetensors")


def test_a_damaged_quantisation_state_is_named(files):
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors["blocks.2.down.weight.quant_state.bitsandbytes__nf4"].fill_(7)

    path = rewritten(files("bitsandbytes nf4"), damage)
    refused("bitsandbytes nf4", path, carom.WeightsError, r"blocks\.2\.down\.weight")


def test_a_block_size_of_zero_is_named(files):
    path = files("bitsandbytes nf4, one level")

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        name = "blocks.2.down.weight.quant_state.bitsandbytes__nf4"
        text = bytes(tensors[name].tolist()).replace(b'"blocksize": 64', b'"blocksize": 0')
        assert b'"blocksize": 0' in text
        tensors[name] = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    refused("bitsandbytes nf4", rewritten(path, damage), carom.WeightsError, "block size")


@pytest.mark.parametrize("kind", BITSANDBYTES)
def test_plain_layers_are_refused_with_what_to_build(files, kind):
    path = files(kind)
    with torch.device("meta"):
        net = Net()
    with pytest.raises(carom.UnsupportedError, match=r"blocks\.0\.up\.weight.*bitsandbytes\.nn\.Linear"):
        carom.stream(net, device="cpu", vram="1MiB", ram=RAM, weights=path)


def test_a_quantised_layer_over_a_plain_file_is_refused(tmp_path):
    kind = KINDS["bitsandbytes nf4"]
    net = kind.on_meta()
    path = tmp_path / "plain.safetensors"
    save_file(plain().state_dict(), path)
    with pytest.raises(carom.UnsupportedError, match="without its quantisation state"):
        carom.stream(net, device="cpu", vram="1MiB", ram=RAM, weights=path)


# -- transformers, GGUF


def test_a_model_of_transformers_streams_from_its_nf4_folder(tmp_path):
    library("bitsandbytes")
    hub = library("transformers")
    integrations = library("transformers.integrations")
    config = hub.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=97, max_position_embeddings=32,
    )  # fmt: skip
    quantisation = hub.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hub.LlamaForCausalLM(config).save_pretrained(tmp_path / "plain")
    loaded = hub.LlamaForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=quantisation, dtype=torch.float32, device_map="cpu"
    )
    loaded.save_pretrained(tmp_path / "nf4")
    loaded = hub.LlamaForCausalLM.from_pretrained(tmp_path / "nf4", dtype=torch.float32, device_map="cpu")
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        expected = loaded.eval()(ids).logits
    with torch.device("meta"):
        model = hub.LlamaForCausalLM(config)
    integrations.replace_with_bnb_linear(
        model, modules_to_not_convert=["lm_head"], quantization_config=quantisation, pre_quantized=True
    )
    model.eval()
    with carom.stream(model, device="cpu", vram="200KiB", ram=RAM, weights=tmp_path / "nf4") as session:
        with torch.no_grad():
            assert torch.equal(expected, model(ids).logits)
        assert any("quantised weights (bitsandbytes" in note for note in session.report().notes)


class GgufLinear(nn.Linear):
    """Computes with the blocks of a Q8_0 weight: 32 codes behind their scale."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.weight.detach().as_subclass(torch.Tensor).view(-1, 34)
        scales, codes = rows[:, :2].view(torch.float16), rows[:, 2:].view(torch.int8)
        weight = (scales.float() * codes.float()).view(self.out_features, self.in_features)
        return nn.functional.linear(x, weight, self.bias)


class GgufParameter(nn.Parameter):
    def __new__(cls, data: torch.Tensor, quant_type: Any = None) -> GgufParameter:
        self = torch.Tensor._make_subclass(cls, data, False)
        self.quant_type = quant_type
        return self


def gguf_net(path: Path) -> Net:
    """Load the file as ComfyUI-GGUF does: the parameters are views of the memory that gguf-py maps."""
    net = Net(GgufLinear).eval()
    for tensor in library("gguf").GGUFReader(path).tensors:
        owner, _, leaf = tensor.name.rpartition(".")
        data = torch.from_numpy(tensor.data)
        module = net.get_submodule(owner)
        if tensor.tensor_type == library("gguf").GGMLQuantizationType.Q8_0:
            setattr(module, leaf, GgufParameter(data, tensor.tensor_type))
        else:
            setattr(module, leaf, nn.Parameter(data, requires_grad=False))
    return net


def save_gguf(path: Path) -> None:
    api = library("gguf")
    kind = api.GGMLQuantizationType.Q8_0
    writer = api.GGUFWriter(path, "test")
    for name, value in plain().state_dict().items():
        if name.endswith("weight") and value.ndim == 2:
            writer.add_tensor(name, api.quants.quantize(value.numpy(), kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc/self/maps is Linux's")
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_gguf_weights_that_are_views_of_the_file_stream_from_it(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    save_gguf(path)
    expected = infer(gguf_net(path), torch.device("cpu"))
    net = gguf_net(path)
    with pytest.raises(carom.BudgetError) as least_vram:
        carom.stream(net, device="cpu", vram=0, ram=RAM, disk="auto")
    budget = least_vram.value.least_bytes
    with carom.stream(net, device="cpu", vram=budget, ram=RAM, disk="auto") as session:
        infer(net, torch.device("cpu"))
        drive = Drive(monkeypatch)
        assert_same(expected, infer(net, torch.device("cpu")))
        assert drive.fresh() > 0
        within_ram(session)
        assert any("1 mapped file" in note for note in session.report().notes)
    assert_same(expected, infer(net, torch.device("cpu")))


def test_a_gguf_file_as_weights_says_how_to_stream_it(tmp_path):
    path = tmp_path / "model.gguf"
    save_gguf(path)
    with torch.device("meta"):
        net = Net()
    with pytest.raises(carom.UnsupportedError, match="disk="):
        carom.stream(net, device="cpu", vram="1MiB", weights=path)


# -- values


@pytest.mark.parametrize("kind", BITSANDBYTES)
def test_a_loaded_module_computes_with_the_file_and_has_its_own_weights_back(files, kind):
    path = files(kind)
    expected = infer(KINDS[kind].load(path), torch.device("cpu"))
    net = KINDS[kind].load(path)
    own = [block.up.weight for block in net.blocks]
    for weight in own:
        weight.data.zero_()
    zeroed = infer(net, torch.device("cpu"))
    with carom.stream(net, device="cpu", vram="1MiB", ram=RAM, weights=path):
        assert_same(expected, infer(net, torch.device("cpu")))
    assert all(block.up.weight is weight for block, weight in zip(net.blocks, own, strict=True))
    assert_same(zeroed, infer(net, torch.device("cpu")))


def test_a_written_value_stays_after_close(files):
    kind = KINDS["torchao int8"]
    path = files("torchao int8")
    net = kind.on_meta()
    with carom.stream(net, device="cpu", vram="400KiB", ram="1MiB", weights=path) as session:
        session.write("blocks.1.up.weight__inner_0", torch.ones(4 * D, D, dtype=torch.int8))
        found = infer(net, torch.device("cpu"))
        assert torch.equal(session.read("blocks.1.up.weight").qdata, torch.ones(4 * D, D, dtype=torch.int8))
    assert torch.equal(net.blocks[1].up.weight.qdata, torch.ones(4 * D, D, dtype=torch.int8))
    assert net.blocks[0].up.weight.is_meta and len(found) == 3


def test_what_was_not_attached_is_as_it_was(files):
    path = files("bitsandbytes nf4")
    net = KINDS["bitsandbytes nf4"].on_meta()
    weights = [block.up.weight for block in net.blocks]
    with pytest.raises(carom.BudgetError):
        carom.stream(net, device="cpu", vram=100, ram=RAM, weights=path)
    assert all(block.up.weight is weight for block, weight in zip(net.blocks, weights, strict=True))
    assert all(weight.is_meta for weight in weights)
