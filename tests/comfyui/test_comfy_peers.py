"""The input ``peers`` of the nodes: its values, and the devices that it names."""

from __future__ import annotations

import types

import pytest
import torch
from carom.nodes import comfyui_api, opening
from carom.nodes.node_settings import Settings, parse_peers

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("", []),
        (" , ", []),
        ("auto", None),
        (" Auto ", None),
        ("cuda:1=8GiB, cuda:2=50%", [("cuda:1", "8GiB"), ("cuda:2", "50%")]),
        ("cuda:1 = AUTO;cuda:3", [("cuda:1", "auto"), ("cuda:3", "auto")]),
        ("gpu:1=6000MB", [("gpu:1", "6000MB")]),
    ],
)
def test_what_the_widget_means(text, pairs):
    assert parse_peers(text) == pairs


@pytest.mark.parametrize(
    "text", ["cuda", "cuda:x=8GiB", "cuda:1=", "=8GiB", "8GiB", "cuda:1=0", "cuda:1=101%"]
)
def test_what_it_does_not_mean_is_refused(text):
    with pytest.raises(ValueError, match="peers"):
        Settings(peers=text).checked()


def test_auto_is_every_other_gpu_and_names_of_comfyui_are_understood(monkeypatch):
    api = types.SimpleNamespace(device_count=lambda: 3, current_device=lambda: 1)
    monkeypatch.setattr(torch, "get_device_module", lambda device: api)
    cards = {index: torch.device("cuda", index) for index in range(3)}
    assert comfyui_api.other_gpus(cards[0]) == ["cuda:1", "cuda:2"]
    assert comfyui_api.other_gpus(torch.device("cuda")) == ["cuda:0", "cuda:2"]
    assert comfyui_api.other_gpus(CPU) == []
    auto = Settings(peers="auto")
    assert opening.peers_of(auto, cards[2]) == [("cuda:0", "auto"), ("cuda:1", "auto")]
    assert opening.peers_of(auto, CPU) == opening.peers_of(Settings(), cards[0]) == []
    monkeypatch.setattr(comfyui_api, "chosen_device", lambda name: (cards[int(name[-1])], {}))
    found = opening.peers_of(Settings(peers="gpu:2=4GiB, cuda:1=1GiB"), cards[0])
    assert found == [(cards[2], "4GiB"), ("cuda:1", "1GiB")]
