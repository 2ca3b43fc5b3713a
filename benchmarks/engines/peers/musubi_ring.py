"""The engine musubi-tuner: its host-to-device ring (`--block_swap_h2d_only`), from the checkout that MUSUBI_PATH
names.

The ring has `Case.ring` buffers; musubi's default is two. In inference musubi itself still swaps blocks in both directions. The ring can
run a forward alone, which is faster, and is therefore measured in both modes.
"""

from __future__ import annotations

import types

import torch

from ..case import Case
from ..dit import Dit
from .base import Attached, Engine, Skip, checkout_commit, find_checkout, load_file, move_outside_blocks

_VARIABLE = "MUSUBI_PATH"
_FILE = "src/musubi_tuner/modules/custom_offloading_utils.py"


def _forward(self: Dit, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Run the model's loop with the two calls that musubi's models make before and after each block."""
    x = self.embed(x)
    if self.training:
        x.requires_grad_(True)  # as in its trainers, for the full backward hook of the first block
    for index, block in enumerate(self.blocks):
        self.offloader.wait_for_block(index)  # type: ignore[operator, union-attr]
        x = self.run_block(block, x, c)
        self.offloader.submit_move_blocks_forward(self.blocks, index)  # type: ignore[operator, union-attr]
    return self.finish(x)


class Musubi(Engine):
    name = "musubi"

    def unavailable(self, case: Case) -> str | None:
        if find_checkout(_VARIABLE, _FILE) is None:
            return f"set {_VARIABLE} to a checkout that has {_FILE}"
        if not case.device.startswith("cuda"):
            return "the ring supports CUDA only"
        if case.streamed == 0:
            return "the ring needs at least one streamed block"
        return None

    def version(self) -> str | None:
        return checkout_commit(_VARIABLE)

    def attach(self, model: Dit, case: Case, device: torch.device) -> Attached:
        reason = self.unavailable(case)
        if reason:
            raise Skip(reason)
        path = find_checkout(_VARIABLE, _FILE)
        assert path is not None
        utils = load_file("musubi_custom_offloading_utils", path)
        train = case.mode == "train"
        if train:
            model.set_checkpointing("inside")  # musubi's blocks checkpoint their own body, inside the hooks
        config = utils.BlockSwapConfig(
            device=device,
            supports_backward=train,
            use_pinned_memory=True,
            h2d_only=True,
            ring_size=case.ring,
        )
        offloader = utils.create_offloader("dit", list(model.blocks), case.depth, case.streamed, config)
        object.__setattr__(model, "offloader", offloader)  # not a submodule
        model.forward = types.MethodType(_forward, model)  # type: ignore[method-assign]
        move_outside_blocks(model, device)
        offloader.prepare_block_devices_before_forward(list(model.blocks))
        return Attached(model, case, device)


ENGINE = Musubi()
