"""Lets a real ai-toolkit import on a machine without the packages that its other models need, and without a GPU.

On PYTHONPATH of the test jobs only, never of a user's. Packages that are imported but not used by these jobs are
stand-ins when they are missing; triton is hidden (without a GPU an extension asks it for one at import); torchvision's
two operators are declared where its binary does not load; CLIP's ``text_model`` is given back to newer transformers.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types

NEVER_USED = (
    "albumentations", "av", "controlnet_aux", "cv2", "kornia", "librosa", "lpips", "mutagen", "open_clip", "soxr",
    "torchaudio",
)  # fmt: skip
TRIES = ("torchvision", "transformers.models.clip.modeling_clip")

if not os.path.exists("/dev/nvidiactl"):
    sys.modules["triton"] = None  # type: ignore[assignment]
kept = []


class Standin(types.ModuleType):
    __path__: list = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {"__module__": self.__name__})
        setattr(self, name, value)
        return value


class Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last in line: what nobody else found, of the packages above."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in NEVER_USED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Standin(spec.name)

    def exec_module(self, module):
        pass


class Prepare(importlib.abc.MetaPathFinder):
    """First in line: something is done before or after one module's import."""

    def find_spec(self, name, path=None, target=None):
        if name not in TRIES:
            return None
        sys.meta_path.remove(self)
        try:
            if name == "torchvision":
                declare_operators()
                return None
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.loader is not None:
                spec.loader = After(spec.loader, give_text_model)
            return spec
        finally:
            sys.meta_path.insert(0, self)


class After(importlib.abc.Loader):
    def __init__(self, loader, then):
        self.loader, self.then = loader, then

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        self.then(module)


def declare_operators():
    """Where torchvision's binary does not fit this torch, its import still asks for the schemas of two operators."""
    import glob
    import os

    import torch

    spec = importlib.util.find_spec("torchvision")
    if kept or spec is None or spec.origin is None:
        return
    try:
        for binary in glob.glob(os.path.join(os.path.dirname(spec.origin), "_C*.so")):
            torch.ops.load_library(binary)
        return
    except OSError:
        pass
    library = torch.library.Library("torchvision", "DEF")
    kept.append(library)
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def give_text_model(module):
    if not hasattr(module, "CLIPTextTransformer"):
        module.CLIPTextModel.text_model = property(lambda self: self)


sys.meta_path.append(Missing())
sys.meta_path.insert(0, Prepare())
