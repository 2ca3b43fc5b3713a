"""Quantised weights as libraries implement them: tensor subclasses that wrap inner tensors."""

from __future__ import annotations

import torch


class Codes(torch.Tensor):
    """A weight quantised as in libraries: 8-bit codes and a scale for each row."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["codes"], inner["scale"])

    def dequantize(self):
        return self.codes.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(func(args[0].codes), func(args[0].scale))
        raise NotImplementedError(func)
