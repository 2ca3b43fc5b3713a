"""timm's architectures, the smallest of each file at a small image size, streamed at 27 % and at the least budget."""

from __future__ import annotations

import random

import pytest
import torch
from outside_harness import COUNT, SEED, Case, Unsupported, assert_same_everywhere
from torch import nn

timm = pytest.importorskip("timm", reason="timm is not installed: its models are not run")

LARGEST = 24 << 20  # bytes of weights
SIZES = (32, 64, 96, 128, 224, 256)  # of images, the first that a model takes
# Parts of names of small variants, the smallest first.
SMALL = [
    "test_",
    "atto",
    "femto",
    "pico",
    "nano",
    "xx",
    "tiny",
    "_xs",
    "lite",
    "mini",
    "050",
    "small",
    "_s",
    "18",
    "26",
]
FAMILIES = sorted(m for m in timm.list_modules() if timm.list_models(module=m))


def case_of(family: str) -> Case:
    """The smallest model of one of timm's files. Raises Unsupported."""
    names = timm.list_models(module=family)
    reason = "nothing was tried"
    for name in sorted(names, key=lambda n: (rank(n), len(n)))[:4]:
        for size in SIZES:
            for more in ({"img_size": size}, {}):
                try:
                    with torch.device("meta"):
                        model = timm.create_model(name, num_classes=5, **more).eval()
                    weights = sum(p.numel() * p.element_size() for p in model.parameters())
                    if weights > LARGEST:
                        reason = f"{name} has {weights} bytes of weights"
                        break
                    channels = model.default_cfg.get("input_size", (3,))[0]
                    model(torch.empty(2, channels, size, size, device="meta"))
                except Exception as error:
                    reason = f"{name}: {type(error).__name__}: {error}"
                    continue
                return Case(
                    f"{name} {size}", made(name, more), lambda c=channels, s=size: (torch.randn(2, c, s, s),)
                )
    raise Unsupported(reason)


def made(name: str, more: dict):
    def make() -> nn.Module:
        return timm.create_model(name, num_classes=5, **more)

    return make


def rank(name: str) -> int:
    return next((place for place, part in enumerate(SMALL) if part in name), len(SMALL))


def deit(name: str, **size: int) -> Case:
    image = size["img_size"]
    return Case(
        f"{name} {image}",
        made(name, {"depth": 2, "num_heads": 2, **size}),
        lambda: (torch.randn(2, 3, image, image),),
    )


# What issue 21 names: tokens that a list keeps while the largest weight, the place embedding, is needed.
NAMED = [
    deit("deit_tiny_distilled_patch16_224", img_size=64),
    deit("deit_tiny_patch16_224", img_size=64, patch_size=4, embed_dim=16),
    deit("deit_tiny_distilled_patch16_224", img_size=96, patch_size=4, embed_dim=16),
    deit("deit3_small_patch16_224", img_size=64, patch_size=4, embed_dim=16),
]


@pytest.mark.parametrize("case", NAMED, ids=lambda case: case.name)
def test_the_named_ones(case):
    assert_same_everywhere(case)


@pytest.mark.slow
def test_deit_tiny_as_it_is_published():
    name = "deit_tiny_patch16_224"
    assert_same_everywhere(Case(name, made(name, {}), lambda: (torch.randn(2, 3, 224, 224),)))


@pytest.mark.parametrize(
    "draw", range(COUNT // 2)
)  # the largest models of all files: most of the sample's time
def test_a_sample(draw):
    """One family by the seed: the first of a shuffled list that has a small model; others are printed."""
    for family in random.Random(1000 * SEED + draw).sample(FAMILIES, len(FAMILIES)):
        try:
            case = case_of(family)
        except Unsupported as reason:
            print(f"{family}: no small model of it: {reason}")
            continue
        print(f"compared: {case.name}")
        return assert_same_everywhere(case)
    raise AssertionError("no family has a small model")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family):
    try:
        case = case_of(family)
    except Unsupported as reason:
        pytest.skip(f"no small model of it: {reason}")
    assert_same_everywhere(case)
