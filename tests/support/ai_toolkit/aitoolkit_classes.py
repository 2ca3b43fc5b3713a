"""A program that loads every model class of a real ai-toolkit at full size with `offload: bouncing`, on a device that
counts.

Run `python aitoolkit_classes.py [ARCH ...]` in the checkout with ai-toolkit's own Python; it prints a line of JSON
for each arch. Objects that the hub would supply are invented: models have the default size of their class and no
values, and tokenizers are mocks.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import importlib
import inspect
import json
import os
import sys
import tempfile
import traceback
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub
import torch
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [os.getcwd(), str(HERE)]
from aitoolkit_counting import DEVICE, Moves, counting, placed  # noqa: E402

# Of ai-toolkit's class for its oldest models, which has a branch for each of these.
LEGACY = ("sd1", "sd2", "sdxl", "ssd", "vega", "sd3", "pixart", "pixart_sigma", "auraflow", "flux", "lumina2")
# What classes ask for besides: keys of the job's model section.
MODEL: dict[str, dict[str, Any]] = {
    "pixart_sigma": {"arch": "pixart", "is_pixart_sigma": True},
    "chroma": {"name_or_path": "lodestones/Chroma1-HD"},
    "chroma_radiance": {"name_or_path": "lodestones/Chroma1-Radiance"},
    "ace_step_15": {"name_or_path": "somebody/model/file.safetensors"},
    "ace_step_15_xl": {"name_or_path": "somebody/model/file.safetensors"},
}
SECONDS = 300  # a class may take


def values(module: nn.Module, prefix: str = "") -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in module.state_dict().items()}


# arch -> what a checkpoint of it holds, where its loader looks into it; ``of`` finds a name in the module of its class.
FILES: dict[str, Callable[[Callable[[str], Any], Any, str], dict[str, torch.Tensor]]] = {
    "chroma": lambda of, sd, file: values(of("Chroma")(of("chroma_params"))),
    "chroma_radiance": lambda of, sd, file: values(of("Chroma")(of("chroma_params"))),
    "zeta_chroma": lambda of, sd, file: values(of("ZImageDCT")(of("ZImageDCTParams")(patch_size=1, in_channels=3072))),
    "krea2": lambda of, sd, file: values(of("SingleStreamDiT")(of("SingleMMDiTConfig")(**of("KREA2_MMDIT_CONFIG")))),
    "ideogram4": lambda of, sd, file: (
        values(of("Ideogram4Transformer2DModel")(of("Ideogram4Config")())) if "transformer" in file else {}
    ),
    "minimax_h3": lambda of, sd, file: (
        values(of("MiniMaxH3Transformer")(of("MiniMaxH3TransformerParams")())) if "diffusion_models" in file else {}
    ),
    "flux2": lambda of, sd, file: (
        values(of("AutoEncoder")(of("AutoEncoderParams")())) if file == "ae.safetensors"
        else values(of("Flux2")(sd.get_flux2_params()))
    ),
    "mageflow": lambda of, sd, file: mageflow(of, file),
    "ace_step_15": lambda of, sd, file: values(
        sys.modules[of("load_models").__module__].AceStep15(), "model.diffusion_model."
    ),
    "ltx2.5": lambda of, sd, file: {"model.diffusion_model.video_embeddings_connector.x": torch.zeros(1)},
}  # fmt: skip
for _one, _others in {
    "flux2": ("flux2_klein_4b", "flux2_klein_9b"),
    "mageflow": ("mageflow_edit",),
    "ace_step_15": ("ace_step_15_xl",),
    "minimax_h3": ("minimax_h3_ref2va",),
}.items():
    FILES |= dict.fromkeys(_others, FILES[_one])
# file -> what is in it, of those that are no checkpoint
TEXTS = {
    "transformer/config.json": {
        "in_channels": 128, "out_channels": 128, "context_in_dim": 2560, "hidden_size": 3072, "num_heads": 24,
        "depth": 24, "axes_dim": [16, 56, 56], "checkpoint": False,
    }
}  # fmt: skip


def mageflow(of: Callable[[str], Any], file: str) -> dict[str, torch.Tensor]:
    if "vae" not in file:
        return {}
    vae = sys.modules[of("MageVAE").__module__]
    decoder = values(vae._DConvDenoiser(), "pipeline.")
    return values(vae._DConvEncoder(), "student.dconv_encoder.") | decoder


# model class -> what its constructor needs, where its defaults are no model
SIZES: dict[str, dict[str, Any]] = {
    "Transformer2DModel": {
        "sample_size": 128, "num_layers": 28, "attention_head_dim": 72, "num_attention_heads": 16, "in_channels": 4,
        "out_channels": 8, "patch_size": 2, "cross_attention_dim": 1152, "norm_type": "ada_norm_single",
        "num_embeds_ada_norm": 1000, "caption_channels": 4096, "norm_elementwise_affine": False,
    },
    "HiDreamImageTransformer2DModel": {
        "patch_size": 2, "in_channels": 16, "num_layers": 16, "num_single_layers": 32, "attention_head_dim": 128,
        "num_attention_heads": 20, "caption_channels": [4096, 4096], "text_emb_dim": 2048, "num_routed_experts": 4,
        "num_activated_experts": 2, "axes_dims_rope": (64, 32, 32), "max_resolution": (128, 128),
        "llama_layers": list(range(32)),
    },
}  # fmt: skip
# arch -> the class that AutoModel finds for it
AUTO = {"lumina2": "Gemma2Model"}


def archs() -> dict[str, Any]:
    """Return arch -> model class for all architectures that ai-toolkit knows."""
    get_model = importlib.import_module("toolkit.util.get_model")
    found = {cls.arch: cls for cls in get_model.get_all_models()}
    return {**dict.fromkeys(LEGACY, get_model.StableDiffusion), **found}


# -- the hub


class Hub:
    """A replacement for everything that loads from the hub or from a file, for one arch."""

    def __init__(self, arch: str, sd: Any, folder: Path) -> None:
        self.arch, self.sd, self.folder = arch, sd, folder

    def model(self, cls: Any, *args: Any, **options: Any) -> nn.Module:
        """Return a model of the class's default size, in place of ``from_pretrained`` of a model class."""
        import transformers

        if issubclass(cls, transformers.PreTrainedModel):
            made = cls(options.get("config") or cls.config_class())
        else:
            made = cls(**SIZES.get(cls.__name__, {}))
        dtype = options.get("torch_dtype") or options.get("dtype")
        return made.to(dtype) if dtype is not None else made

    def auto(self, cls: Any, *args: Any, **options: Any) -> nn.Module:
        import transformers

        return self.model(getattr(transformers, AUTO.get(self.arch, "Qwen3VLModel")), **options)

    def pipeline(self, cls: Any, path: Any = None, **given: Any) -> Any:
        """Return a pipeline with the parts that its constructor requires, in place of ``from_pretrained`` of a
        pipeline.
        """
        parts = {}
        for name, parameter in list(inspect.signature(cls.__init__).parameters.items())[1:]:
            if name in given:
                parts[name] = given[name]
            elif parameter.default is inspect.Parameter.empty:
                parts[name] = self.part(parameter.annotation)
        return cls(**parts)

    def components(self, pipe: Any, **options: Any) -> None:
        """Add the parts of a modular pipeline, in place of its ``load_components``."""
        loaded = (s for s in pipe._component_specs.values() if s.default_creation_method == "from_pretrained")
        pipe.update_components(**{s.name: self.part(s.type_hint, **options) for s in loaded})

    def part(self, annotation: Any, **options: Any) -> Any:
        for kind in typing.get_args(annotation) or (annotation,):
            if isinstance(kind, type) and issubclass(kind, nn.Module):
                return self.model(kind, **options)
            if isinstance(kind, type) and hasattr(kind, "from_config"):
                return kind()
        return mock.MagicMock()

    def download(self, *args: Any, **options: Any) -> str:
        name = str(options.get("filename") or args[-1])
        if name.endswith(".index.json"):
            raise huggingface_hub.errors.LocalEntryNotFoundError("no shards")
        file = self.folder / name.replace("/", "_")
        file.write_text(json.dumps(TEXTS.get(name, {})))
        return str(file)

    def file(self, path: Any, *args: Any, **options: Any) -> dict[str, torch.Tensor]:
        made = FILES.get(self.arch)
        return made(self.of, self.sd, Path(path).name) if made is not None else {}

    def of(self, name: str) -> Any:
        modules = [sys.modules[cls.__module__] for cls in type(self.sd).__mro__]
        return next(vars(module)[name] for module in modules if name in vars(module))

    def patches(self) -> Iterator[Any]:
        import diffusers
        import safetensors.torch
        import transformers

        tokens = transformers.PreTrainedTokenizerBase, transformers.AutoTokenizer
        pictures = transformers.image_processing_base.ImageProcessingMixin
        for cls in (*tokens, transformers.ProcessorMixin, transformers.AutoProcessor, pictures):
            yield mock.patch.object(cls, "from_pretrained", lambda *_, **__: mock.MagicMock())
        yield mock.patch.object(
            transformers.AutoConfig, "from_pretrained", lambda *_, **__: transformers.Qwen3VLConfig()
        )
        yield mock.patch.object(safetensors, "safe_open", mock.MagicMock(side_effect=Metadata))
        mel = "torchaudio.transforms.MelSpectrogram"  # torchaudio need not be there
        yield mock.patch(mel, lambda **_: nn.Identity(), create=True)
        for cls, made in (
            (diffusers.ModelMixin, self.model),
            (diffusers.models.modeling_utils.LegacyModelMixin, self.model),
            (transformers.PreTrainedModel, self.model),
            (transformers.AutoModel, self.auto),
            (diffusers.DiffusionPipeline, self.pipeline),
            (diffusers.SchedulerMixin, lambda cls, *_, **__: cls()),
        ):
            yield mock.patch.object(cls, "from_pretrained", classmethod(made))
        load = lambda pipe, **options: self.components(pipe, **options)  # noqa: E731 - bound to the pipeline
        yield mock.patch.object(diffusers.ModularPipeline, "load_components", load)
        # Made-up values need no beginning; some beginnings are drawn until they fit.
        yield mock.patch.object(transformers.PreTrainedModel, "init_weights", lambda self: self.tie_weights())
        instead = {safetensors.torch.load_file: self.file, huggingface_hub.hf_hub_download: self.download}
        for module in list(sys.modules.values()):  # each has its own name for them
            for name, there in list(vars(module).items()) if isinstance(module, types.ModuleType) else ():
                if isinstance(there, types.FunctionType) and there in instead:
                    yield mock.patch.object(module, name, instead[there])


class Metadata:
    """A safetensors file of which only the metadata are read."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __enter__(self) -> Metadata:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def metadata(self) -> dict[str, str]:
        return {"gemma_config": json.dumps({"text_config": {}})}


# -- one class


def load(arch: str, cls: Any, offload: bool, changes: dict[str, Any]) -> dict[str, Any]:
    """Load a model class as a job does; return byte counts and the names of models that were moved to the device
    whole.

    ``moved``: models that were on the device whole while the class loaded; ``whole``: models that were so then, or
    when the job called `.to(device)` afterwards. VAEs are not listed.
    """
    from carom.toolkit_ext import toolkit_patches
    from carom.toolkit_ext.loading import has_stack
    from toolkit.config_modules import ModelConfig

    if offload:
        toolkit_patches.install()
        changes = {**changes, "offload": "bouncing"}
    config = ModelConfig(
        **{"name_or_path": "somebody/model", "arch": arch, "dtype": "bf16", **MODEL.get(arch, {}), **changes}
    )
    sd = cls(device=str(DEVICE), model_config=copy.deepcopy(config), dtype="bf16")
    process = types.SimpleNamespace(model_config=config, sd=sd)
    moves, own, told = Moves(has_stack), sd.load_model, {}

    def load_model() -> None:
        own()
        told.update(moved=list(moves.whole), peak=counted.peak)

    sd.load_model = load_model
    with contextlib.ExitStack() as stack:
        for patch in Hub(arch, sd, Path(tempfile.mkdtemp())).patches():
            stack.enter_context(patch)
        counted = stack.enter_context(counting(moves))
        toolkit_patches._before_load(lambda self: None, process)
        sd.load_model()
        told["after"] = counted.bytes
        job = getattr(process, toolkit_patches.JOB, None)
        streams = {} if job is None else {a.name: a.module for a in job.attachments}
        for module in streams.values():
            module.to(DEVICE)
        told["streams"] = {name: placed(module)[1] for name, module in streams.items()}
        told["on_device"] = sum(placed(module)[0] for module in streams.values())
        vaes = {type(part).__name__ for part in sd.vae.modules()}
        told["moved"] = [name for name in told["moved"] if name not in vaes]
        told["whole"] = [name for name in moves.whole if name not in vaes]
    return told


def main() -> None:
    """Load the classes and print their results. ``--plain``: without Carom; ``KEY=VALUE``: a key of the model
    section.
    """
    every = archs()
    words = [word for word in sys.argv[1:] if word != "--plain"]
    changes = {
        key: json.loads(value) for key, _, value in (word.partition("=") for word in words if "=" in word)
    }
    for arch in [word for word in words if "=" not in word] or every:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            try:
                told = load(arch, every[arch], "--plain" not in sys.argv, changes)
            except BaseException:
                told = {"error": traceback.format_exc()}
            print("LOADED", json.dumps({"arch": arch, "class": every[arch].__name__, **told}), flush=True)
            os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
