"""Search for the dense linear modules of a mixture-of-experts (MoE) model: the modules that process every
token.

A router sends each token to a few of many routed experts. The experts hold most of the model's weights, so
adapters on all experts would hold as large a share of all adapter weights, and each adapter would be trained
on only a few tokens a step. Attention and shared experts process every token, so adapters are added to these.
Routed experts are found by structure and by the attribute name ``experts``, which libraries have in common.
No list of model classes is kept.
"""

from __future__ import annotations

from torch import nn

from ..common.errors import UnsupportedError


def dense_modules(model: nn.Module) -> list[str]:
    """Return the names of the linear modules in ``model``'s repeated blocks that process every token, for
    PEFT's ``target_modules``.

    Attention, dense feed-forwards and shared experts are included. Routed experts, their routers, gates with
    one output, embeddings and output heads are not. For a model without experts, all linear modules of its
    blocks are returned. ``model`` may be on the meta device, and may be streamed. Raises UnsupportedError if
    no module is found.
    """
    routed = _routed(model)
    found = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not hasattr(module, "in_features") or not hasattr(module, "out_features") or weight is None:
            continue
        in_block = any(part.isdigit() for part in name.split("."))
        if (
            in_block
            and module.out_features != 1
            and not any(_is_within(name, ancestor) for ancestor in routed)
        ):
            found.append(name)
    if not found:
        raise UnsupportedError(
            f"{type(model).__name__} has no linear modules in repeated blocks outside routed experts; name target_modules"
        )
    return found


def _routed(model: nn.Module) -> set[str]:
    """Return the names of the modules that take part in routing: containers of experts, modules with the
    experts' weights stacked in one tensor, and routers.
    """
    found: set[str] = set()
    for name, module in model.named_modules():
        for child_name, child in module.named_children():
            experts = _expert_count(child)
            # A router is a sibling module with one output for each expert.
            routers = {
                sibling_name
                for sibling_name, sibling in module.named_children()
                if sibling is not child and experts and _output_rows(sibling) == experts
            }
            in_block = any(part.isdigit() for part in name.split("."))
            # Experts are recognised by the common attribute name, or by a router beside them.
            if child_name == "experts" or (in_block and routers):
                found.add(_join(name, child_name))
                found.update(_join(name, router) for router in routers)
    return found


def _expert_count(module: nn.Module) -> int:
    """Return how many experts ``module`` could hold, 0 if it cannot hold any.

    This is the number of its children if all children have equal shapes, or the first dimension of its
    parameters with three dimensions.
    """
    children = list(module.children())
    shapes = {tuple(parameter.shape for parameter in child.parameters()) for child in children}
    if len(children) > 1 and len(shapes) == 1 and len(next(iter(shapes))) > 1:
        return len(children)
    stacked = {parameter.shape[0] for parameter in module.parameters() if parameter.dim() == 3}
    return stacked.pop() if len(stacked) == 1 else 0


def _output_rows(module: nn.Module) -> int:
    """Return the number of rows of the module's weight matrix, 0 if it has no matrix."""
    shape = tuple(getattr(getattr(module, "weight", None), "shape", ()))
    return shape[0] if len(shape) == 2 else 0


def _join(name: str, child: str) -> str:
    """Return the dotted name of ``child`` in the module called ``name``."""
    return f"{name}.{child}" if name else child


def _is_within(name: str, ancestor: str) -> bool:
    """Return whether the module called ``name`` is ``ancestor`` or lies below ``ancestor``."""
    return name == ancestor or name.startswith(ancestor + ".")
