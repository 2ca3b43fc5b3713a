"""A comfy_aimdo.torch; see torch_init.py."""

import os

import torch


class View(torch.Tensor):
    def copy_(self, other, non_blocking=False):
        super().copy_(other)
        if os.environ.get("CAROM_FAKE") == "wrong_vbar":
            self.data[7] += 1
        return self


def aimdo_to_tensor(handle, device):
    return View([0])
