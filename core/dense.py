"""Which modules of a mixture-of-experts model are dense: used for every token, and so worth an adapter.

A token visits a few routed experts of many: their weights are the bulk of the bytes, adapters on all of them would
be as many, and each would see a few tokens a step. Attention and shared experts see all. Found by structure and by the
one word that libraries share: no list of model classes is kept.
"""

from __future__ import annotations

from torch import nn

from .errors import UnsupportedError


def dense_modules(model: nn.Module) -> list[str]:
    """Names of the linear modules of ``model``'s repeated blocks that every token passes: PEFT's ``target_modules``.

    Attention, dense feed-forwards and shared experts are among them; routed experts, their routers, gates of one
    output, embeddings and output heads are not. Works on ``meta``, and while the module is streamed. A model without
    experts gives all linears of its blocks. Raises UnsupportedError where none is found.
    """
    routed = _routed(model)
    found = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not hasattr(module, "in_features") or not hasattr(module, "out_features") or weight is None:
            continue
        in_block = any(part.isdigit() for part in name.split("."))
        if in_block and module.out_features != 1 and not any(_below(name, top) for top in routed):
            found.append(name)
    if not found:
        raise UnsupportedError(
            f"{type(model).__name__} has no linear modules in repeated blocks outside routed experts; name target_modules"
        )
    return found


def _routed(model: nn.Module) -> set[str]:
    """Names of what belongs to routing: containers of experts, stacked experts, and routers."""
    found: set[str] = set()
    for name, module in model.named_modules():
        for child_name, child in module.named_children():
            alike = _alike(child)
            # A router has an output for each expert.
            routers = {
                other
                for other, beside in module.named_children()
                if beside is not child and alike and _rows(beside) == alike
            }
            in_block = any(part.isdigit() for part in name.split("."))
            if child_name == "experts" or (in_block and routers):  # the libraries' word, or the structure
                found.add(_join(name, child_name))
                found.update(_join(name, router) for router in routers)
    return found


def _alike(module: nn.Module) -> int:
    """How many experts ``module`` could hold: children of equal shapes, or parameters of three dimensions; 0 for none."""
    children = list(module.children())
    shapes = {tuple(parameter.shape for parameter in child.parameters()) for child in children}
    if len(children) > 1 and len(shapes) == 1 and len(next(iter(shapes))) > 1:
        return len(children)
    stacked = {parameter.shape[0] for parameter in module.parameters() if parameter.dim() == 3}
    return stacked.pop() if len(stacked) == 1 else 0


def _rows(module: nn.Module) -> int:
    shape = tuple(getattr(getattr(module, "weight", None), "shape", ()))
    return shape[0] if len(shape) == 2 else 0


def _join(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _below(name: str, top: str) -> bool:
    return name == top or name.startswith(top + ".")
