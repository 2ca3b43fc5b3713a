"""Runs modules that others wrote, plain and under `carom.stream`, and compares the two bit for bit.

A `Case` is a model and its inputs; a mode says what is trained: "infer" (nothing, no gradients), "frozen" (nothing, gradients
of the inputs), "lora" (peft's adapters), "full" (all weights, streamed). A budget is "least" (exactly the least that works;
one byte less must be refused) or "share" (27 % of the weights' bytes, where that is more). Where a model uses several units
at once that do not fit, the error of its step names a larger budget, which must work.

CAROM_OUTSIDE_SEED and CAROM_OUTSIDE_COUNT choose which samples run by default, and how many of each file.
`pytest -m slow tests/outside` runs everything.
"""

from __future__ import annotations

import contextlib
import os
import random
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import carom
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

SEED = int(os.environ.get("CAROM_OUTSIDE_SEED", "0"))
COUNT = int(os.environ.get("CAROM_OUTSIDE_COUNT", "4"))
MODES = ("infer", "lora", "full")
BUDGETS = ("least", "share")
SHARE = 0.27
STEPS = 2
MOST_NAMED = 2  # budgets that errors name until one works


class Unsupported(Exception):
    """The plain run itself cannot be made or compared; the message says why."""


@dataclass(frozen=True)
class Case:
    """A model and its inputs. ``make()`` and ``inputs()`` draw from torch's generator, which is seeded before."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple | dict]
    modes: tuple[str, ...] = MODES
    call: Callable[[nn.Module, Any], Any] | None = None  # where it is not model(*inputs) or model(**inputs)
    input_gradients: bool = True  # some models refuse inputs that want gradients
    training: bool | None = None  # None: in training mode where all weights train
    granularity: str = "auto"

    def build(self, mode: str) -> nn.Module:
        seed(0)
        model = self.make()
        model.train(mode == "full" if self.training is None else self.training)
        return add_lora(model) if mode == "lora" else model.requires_grad_(mode == "full")

    def settings(self, mode: str) -> dict[str, Any]:
        """What `carom.stream` is told beside device and budget."""
        trains = {"training": "stream"} if mode == "full" else {}
        return {"granularity": self.granularity, **trains}

    def run(self, model: nn.Module, inputs: Any) -> Any:
        if self.call is not None:
            return self.call(model, inputs)
        return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


# -- tests


def sampled(everything: Sequence, count: int = COUNT) -> list:
    """``count`` of ``everything``, by the seed."""
    return random.Random(SEED).sample(list(everything), min(count, len(everything)))


def devices(case: Case) -> dict[str, Any]:
    timing = ("late", "early", "random")[(SEED + zlib.crc32(case.name.encode())) % 3]
    return {"cpu": "cpu", f"simulated-{timing}": carom.SimulatedDevice(seed=SEED, timing=timing)}


def assert_same_everywhere(case: Case, budgets: Sequence[str] = BUDGETS) -> None:
    """In each of its modes, on each device and under each budget ``case`` gives what it gives plain.

    A case of which no mode can be compared is skipped with the reasons."""
    wrong, unsupported = [], []
    for mode in case.modes:
        try:
            wrong += failures(case, mode, devices(case), budgets)
        except Unsupported as reason:
            unsupported.append(f"{mode}: {reason}")
    assert not wrong, "\n".join([f"{len(wrong)} runs are not what the plain ones are:", *wrong])
    if unsupported:
        print(f"{case.name} was not compared in some modes: {'; '.join(unsupported)}")
        if len(unsupported) == len(case.modes):
            pytest.skip("; ".join(unsupported))


def failures(
    case: Case, mode: str, devices: dict[str, Any], budgets: Sequence[str] = BUDGETS, count: int = STEPS
) -> list[str]:
    """What goes wrong, in words. Raises Unsupported."""
    try:
        plain = run_plain(case, mode, count)
    except Exception as error:
        raise Unsupported(f"the plain run fails: {type(error).__name__}: {error}") from error
    found = []
    for name, device in devices.items():
        for budget in budgets:
            where = f"{case.name}, {mode}, {name}, {budget}"
            try:
                streamed = run_streamed(case, mode, device, budget, count)
            except Exception as error:
                found.append(f"{where}: {type(error).__name__}: {error}")
                continue
            wrong = [] if streamed is None else differences(plain, streamed)
            if (
                wrong and device != "cpu"
            ):  # the simulated device looks on through a dispatch mode: docs/limits.md
                wrong = differences(run_plain(case, mode, count, watched=True), streamed)
            if wrong and differences(plain, run_plain(case, mode, count)):
                raise Unsupported("two plain runs differ")
            if wrong:
                found.append(f"{where}: {len(wrong)} of {len(plain)} results differ: {', '.join(wrong[:5])}")
    return found


# -- runs

Seen = dict[str, torch.Tensor]


class LooksOn(TorchDispatchMode):
    """Sees every operator and does nothing. Under any mode torch's engine adds gradients up out of place, and their sum may have
    other strides, from which other kernels round otherwise."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*args, **(kwargs or {}))


def run_plain(case: Case, mode: str, count: int = STEPS, watched: bool = False) -> Seen:
    with deterministic():
        model = case.build(mode)
        with LooksOn() if watched else contextlib.nullcontext():
            return steps(case, model, mode, count) | values_of(model)


def run_streamed(case: Case, mode: str, device: Any, budget: str, count: int = STEPS) -> Seen | None:
    """The same under a budget; None for a share that is less than the least."""
    with deterministic():
        model = case.build(mode)
        settings = case.settings(mode)
        vram = least_bytes(model, device, settings)
        if budget == "share":
            share = int(SHARE * bytes_of((*model.parameters(), *model.buffers())))
            if share <= vram:
                return None
            vram = share
    for _ in range(MOST_NAMED):
        try:
            return run_within(case, mode, device, vram, count)
        except carom.BudgetError as error:
            assert (error.least_bytes or 0) > vram, f"{error.least_bytes} bytes are named after {vram} failed"
            vram = error.least_bytes or 0
    return run_within(case, mode, device, vram, count)


def run_within(case: Case, mode: str, device: Any, vram: int, count: int) -> Seen:
    """The same under a budget of ``vram`` bytes."""
    with deterministic():
        model = case.build(mode)
        settings = case.settings(mode)
        before = {name: (p, p.device, p.dtype) for name, p in model.named_parameters()}
        with carom.stream(model, device=device, vram=vram, **settings) as session:
            seen = steps(case, model, mode, count)
        apart = 0 if mode == "full" else bytes_of([p for p in model.parameters() if p.requires_grad])
        peak = session.report().vram_peak_bytes
        assert peak <= vram + apart, f"{peak} bytes were held under a budget of {vram}"
        after = {name: (p, p.device, p.dtype) for name, p in model.named_parameters()}
        assert before.keys() == after.keys()
        for name, (parameter, *kind) in before.items():
            assert after[name][0] is parameter, f"{name} is another object"
            assert list(after[name][1:]) == kind, f"{name} was {kind}"
        return seen | values_of(model)


def least_bytes(model: nn.Module, device: Any, settings: dict[str, Any]) -> int:
    """The least budget; that one byte less is refused is checked."""
    try:
        carom.stream(model, device=device, vram=1, **settings).close()
    except carom.BudgetError as refused:
        least = refused.least_bytes
    else:
        return 1  # it has no weights
    assert least is not None, "the least budget is not known"
    try:
        carom.stream(model, device=device, vram=least - 1, **settings).close()
    except carom.BudgetError:
        return least
    raise AssertionError(f"the least budget is said to be {least} bytes, and one less is not refused")


def steps(case: Case, model: nn.Module, mode: str, count: int) -> Seen:
    """What can be observed of ``count`` steps: outputs, and gradients of inputs and of what is trained."""
    seen: Seen = {}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=0.01) if trained else None
    for step in range(count):
        seed(100 + step)
        inputs = case.inputs()
        if mode == "infer":
            with torch.no_grad():
                outputs = tensors_of(case.run(model, inputs))
        else:
            inputs, leaves = with_gradients(inputs, case.input_gradients)
            outputs = tensors_of(case.run(model, inputs))
            losses = [out.float().pow(2).mean() for out in outputs if out.requires_grad]
            if losses:
                torch.stack(losses).sum().backward()
            del losses
            gradients = {f"input {index}": leaf.grad for index, leaf in enumerate(leaves)}
            gradients |= {name: parameter.grad for name, parameter in trained.items()}
            for name, gradient in gradients.items():
                if gradient is not None:
                    seen[f"step {step}: gradient of {name}"] = gradient.detach().clone()
        for index, out in enumerate(outputs):
            seen[f"step {step}: output {index}"] = out.detach().clone()
        del outputs
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return seen


def with_gradients(inputs: Any, wanted: bool) -> tuple[Any, list[torch.Tensor]]:
    """``inputs``, and the leaves whose gradients are looked at: those that ask for one, else all that can have one."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    asking = [t for t in tensors if t.requires_grad]
    chosen = asking or [t for t in tensors if wanted and (t.is_floating_point() or t.is_complex())]
    leaves = {id(t): t.detach().clone().requires_grad_() for t in chosen}
    # What the model is given is no leaf, so that it may write to it.
    given = tree_map(lambda leaf: leaves[id(leaf)].clone() if id(leaf) in leaves else leaf, inputs)
    return given, list(leaves.values())


def add_lora(model: nn.Module) -> nn.Module:
    """``model`` frozen, with peft's adapters beside its linears (or its convolutions), none of them zero."""
    peft = pytest.importorskip("peft", reason="peft is not installed: LoRA is not run")
    model.requires_grad_(False)
    attention = nn.modules.linear.NonDynamicallyQuantizableLinear  # torch's attention never calls its own
    named = list(model.named_modules())
    linears = [name for name, m in named if isinstance(m, nn.Linear) and not isinstance(m, attention)]
    linears = linears or [name for name, m in named if isinstance(m, nn.Conv2d) and m.groups == 1]
    if not linears:
        raise Unsupported("it has nothing that peft adapts")

    def inject(names: list[str]) -> nn.Module:
        config = peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False)
        with warnings.catch_warnings():  # of patterns that transformers has for peft, and fit nothing here
            warnings.simplefilter("ignore")
            return peft.inject_adapter_in_model(config, model)

    try:
        return inject(linears)
    except ValueError:  # peft refuses the last linear of Mamba's mixers
        return inject([name for name in linears if not name.endswith("out_proj")])


# -- tensors


def seed(number: int) -> None:
    torch.default_generator.manual_seed(number)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    before, generator = torch.are_deterministic_algorithms_enabled(), torch.get_rng_state()
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.set_rng_state(generator)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor of an output, whatever holds it."""
    found = []
    for leaf in tree_leaves(value.to_tuple() if hasattr(value, "to_tuple") else value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif isinstance(getattr(leaf, "__dict__", None), dict):  # a distribution, a cache
            found += [item for item in tree_leaves(vars(leaf)) if isinstance(item, torch.Tensor)]
    return found


def values_of(model: nn.Module) -> Seen:
    named = (*model.named_parameters(), *model.named_buffers())
    return {f"after close: {name}": tensor.detach().clone() for name, tensor in named}


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


def differences(plain: Seen, streamed: Seen) -> list[str]:
    """Names of results that are not the same to the bit."""
    one_sided = [f"{name} (only one run has it)" for name in sorted(plain.keys() ^ streamed.keys())]
    return one_sided + [name for name in plain if name in streamed and not same(plain[name], streamed[name])]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.is_nested:
        return all(map(same, a.unbind(), b.unbind()))
    if not a.numel():
        return True
    return torch.equal(*(t.cpu().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))
