"""Code that reads a streamed weight by its address gets the weight's bytes within a step, and an error elsewhere."""

from __future__ import annotations

import ctypes

import carom
import pytest
import torch
from safetensors.torch import save_file
from tests_limits import pack_small_weights
from torch import nn

WIDTH, DEPTH = 64, 12
X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
WAYS = ("lossless", "file", "spilled")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small tensors pack too."""
    pack_small_weights(monkeypatch)


def bytes_at(address: int, like: torch.Tensor) -> torch.Tensor:
    raw = (ctypes.c_char * (like.numel() * like.element_size())).from_address(address)
    return torch.frombuffer(bytearray(raw.raw), dtype=like.dtype).view(like.shape)


def by_storage(weight: torch.Tensor) -> int:
    return weight.untyped_storage().data_ptr() + weight.storage_offset() * weight.element_size()


READS = {
    "data_ptr": lambda weight: weight.data_ptr(),
    "data": lambda weight: weight.data.data_ptr(),
    "storage": by_storage,
    "typed storage": lambda weight: weight.storage().data_ptr() + 2 * weight.storage_offset(),
}


class Net(nn.Module):
    """Its forward takes the address of the first streamed layer's weight, and reads the bytes after the layers ran."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.streamed = 0
        self.read = READS["data_ptr"]
        self.found: list[torch.Tensor] = []
        self.bfloat16().requires_grad_(False)

    @property
    def weight(self) -> torch.Tensor:
        return self.layers[self.streamed].weight

    def forward(self, x):
        address = self.read(self.weight)
        for layer in self.layers:
            x = layer(x)
        self.found = [bytes_at(address, self.weight)]
        return x


def attach(way: str, folder) -> tuple[Net, carom.Session]:
    model, options = Net(), {"codec": "lossless" if way == "lossless" else "raw"}
    if way == "file":
        save_file(model.state_dict(), folder / "model.safetensors")
        options |= {"weights": folder / "model.safetensors", "ram": "16MiB"}
        model = Net().to("meta")
    elif way == "spilled":
        options |= {"disk": folder, "ram": 2 * WIDTH * WIDTH}
    session = carom.stream(model, device="cpu", vram=10 * WIDTH * WIDTH, granularity="layer", **options)
    resident = {entry["name"] for entry in session.report().to_dict()["resident_by_choice"]}
    assert way != "lossless" or session.report().packed_units
    model.streamed = next(index for index in range(DEPTH) if f"layers.{index}" not in resident)
    return model, session


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("way", WAYS)
def test_the_address_in_a_pass_is_that_of_the_weights_bytes_until_the_pass_ends(way, read, tmp_path):
    model, session = attach(way, tmp_path)
    want = Net().layers[model.streamed].weight
    with session, torch.no_grad():
        model.read = READS[read]
        for _ in range(3):
            model(X)
            assert torch.equal(model.found[0], want)


@pytest.mark.parametrize("way", WAYS)
def test_a_backward_follows_a_forward_that_read_an_address(way, tmp_path):
    model, session = attach(way, tmp_path)
    twin = Net()
    with session:
        for _ in range(2):
            ours, theirs = X.clone().requires_grad_(), X.clone().requires_grad_()
            model(ours).float().pow(2).mean().backward()
            twin(theirs).float().pow(2).mean().backward()
            assert torch.equal(model.found[0], twin.layers[model.streamed].weight) and torch.equal(
                ours.grad, theirs.grad
            )


@pytest.mark.parametrize("way", WAYS)
def test_outside_a_step_data_ptr_raises(way, tmp_path):
    model, session = attach(way, tmp_path)
    with session:
        for weight in (
            model.weight,
            model.weight.data,
            model.state_dict()[f"layers.{model.streamed}.weight"],
        ):
            with pytest.raises(carom.UnsupportedError, match=r"layers.*weight .*session.read"):
                weight.data_ptr()
            assert torch.equal(weight.clone(), Net().layers[model.streamed].weight)
        assert model.weight.dtype == torch.bfloat16 and model.weight.nbytes == 2 * WIDTH * WIDTH
        assert model.weight.is_floating_point() and model.weight.element_size() == 2
        assert "bfloat16" in repr(model.weight)
    model.weight.data_ptr()


def test_kernels_that_are_given_a_packed_weights_tensor_itself_raise(tmp_path):
    """As C++ extensions are, which torch calls without ``__torch_function__``."""
    model, session = attach("lossless", tmp_path)
    with session:
        weight = model.weight
        for kernel in (
            lambda: weight.view(torch.int16).clone().tolist(),
            lambda: X @ weight.t(),
            lambda: weight.to(torch.float32) + X.float()[0],
            lambda: torch.utils.dlpack.to_dlpack(weight),
            lambda: nn.functional.embedding(torch.tensor([1]), weight).float().tolist(),
        ):
            with pytest.raises((RuntimeError, BufferError)), torch._C.DisableTorchFunctionSubclass():
                kernel()
    assert torch.equal(model.weight, Net().layers[model.streamed].weight)
