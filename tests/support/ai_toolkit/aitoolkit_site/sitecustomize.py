"""Import hooks with which a real ai-toolkit can be imported without a GPU and without packages that only other models
need.

The folder is on PYTHONPATH of the test jobs only. Missing packages that these jobs import but do not use are
replaced. triton is hidden, because without a GPU an extension asks triton for one at import. torchvision's two
operators are declared if its binary does not load. CLIP's ``text_model`` is restored in newer versions of
transformers.
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
    """The last import finder, which replaces the packages above if no other finder found them."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in NEVER_USED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Standin(spec.name)

    def exec_module(self, module):
        pass


class Prepare(importlib.abc.MetaPathFinder):
    """The first import finder, which acts before or after the import of certain modules."""

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
    """Declare the schemas of two operators that torchvision's import needs even if its binary does not fit this
    torch.
    """
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
