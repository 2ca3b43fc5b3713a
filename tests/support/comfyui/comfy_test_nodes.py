"""A custom node pack for tests of the real server. It is copied to custom_nodes; pytest never imports it."""

import hashlib
import sys
import time

import torch

# Sizes that ComfyUI keeps in files of its own, of text encoders whose kind it tells by something else: layers, tokens and
# blocks are theirs, width is not. Both loaders get the same ones.
SMALL_T5 = {"d_model": 32, "d_kv": 16, "num_heads": 2}
SMALL_ENCODERS = {
    "t5_config_xxl.json": SMALL_T5,
    "umt5_config_xxl.json": {**SMALL_T5, "vocab_size": 512},
    "Gemma2_2B": {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4,
        "num_attention_heads": 2, "num_key_value_heads": 1,
    },
}  # fmt: skip


def shrink_text_encoders():
    import json
    import os

    from comfy.sd1_clip import SDClipModel

    own = SDClipModel.__init__

    def small(self, *args, textmodel_json_config=None, **kwargs):
        sizes = textmodel_json_config
        if isinstance(sizes, dict):
            sizes = {**sizes, **SMALL_ENCODERS.get(kwargs["model_class"].__name__, {})}
        elif sizes is not None and os.path.basename(sizes) in SMALL_ENCODERS:
            with open(sizes) as file:
                sizes = {**json.load(file), **SMALL_ENCODERS[os.path.basename(sizes)]}
        own(self, *args, textmodel_json_config=sizes, **kwargs)

    SDClipModel.__init__ = small


ANY = type("Any", (str,), {"__ne__": lambda self, other: False})("*")


class Conditioning:
    """A node that returns random conditioning instead of a text encoder's."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("CONDITIONING",), "make", "carom-test"

    @classmethod
    def INPUT_TYPES(cls):
        number = ("INT", {"default": 8, "min": 1, "max": 1 << 16})
        return {
            "required": {"tokens": number, "width": number, "pooled": number, "seed": ("INT", {"default": 0})}
        }

    def make(self, tokens, width, pooled, seed):
        generator = torch.Generator().manual_seed(seed)
        cond = torch.randn(1, tokens, width, generator=generator)
        return ([[cond, {"pooled_output": torch.randn(1, pooled, generator=generator)}]],)


class Latent:
    """A node that returns an empty latent of any shape."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("LATENT",), "make", "carom-test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"shape": ("STRING", {"default": "1,16,16,16"})}}

    def make(self, shape):
        return ({"samples": torch.zeros([int(n) for n in shape.split(",")])},)


class Hash:
    """A node that reports the hash of a value's bits, and the memory that a model holds."""

    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "tell", "carom-test", True

    @classmethod
    def INPUT_TYPES(cls):
        more = {"model": ("MODEL",), "vae": ("VAE",), "control_net": ("CONTROL_NET",)}
        return {"required": {"value": (ANY,)}, "optional": more}

    @classmethod
    def IS_CHANGED(cls, **_):
        return float("nan")  # older versions report nothing of what they took from their cache

    def tell(self, value, model=None, vae=None, control_net=None):
        if isinstance(value, dict):
            value = value["samples"]
        values = [value]
        if isinstance(value, list):
            cond, more = value[0]
            values = [cond, *(more[name] for name in sorted(more) if torch.is_tensor(more[name]))]
        bits = hashlib.sha256()
        for value in values:
            bits.update(value.contiguous().view(torch.uint8).numpy().tobytes())
        told = {
            "hash": [bits.hexdigest()],
            "finite": [all(bool(torch.isfinite(value.float()).all()) for value in values)],
        }
        if vae is not None:
            model = vae.patcher
        if control_net is not None:
            model = control_net.control_model_wrapped
        if model is not None:
            told["class"] = [type(model).__name__]
            told["held"] = [int(model.loaded_size())]
            told["size"] = [int(model.model_size())]
            told["memory_errors"] = list(ShortOfMemory.errors)
            compiler = sys.modules.get("torch._dynamo.utils")
            told["graphs"] = [compiler.counters["stats"]["unique_graphs"] if compiler else 0]
            session = getattr(model.model.__dict__.get("_carom_streaming"), "session", None)
            if session is not None:
                told["report"] = [session.report().to_dict()]
        return {"ui": told}


class Fails:
    """A node that returns a model whose forward raises at the n-th call."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "make", "carom-test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "call": ("INT", {"default": 1})}}

    def make(self, model, call):
        copy, seen = model.clone(), []

        def patch(args):
            seen.append(1)
            if len(seen) == call:
                raise RuntimeError("a node of the test fails here")
            return args

        copy.set_model_patch(patch, "post_input")
        return (copy,)


class Slow:
    """A node that returns a model with a slow forward, so that it can be interrupted."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "make", "carom-test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "seconds": ("FLOAT", {"default": 0.5})}}

    def make(self, model, seconds):
        copy = model.clone()

        def wait(run, args):
            time.sleep(seconds)
            return run(args["input"], args["timestep"], **args["c"])

        copy.set_model_unet_function_wrapper(wait)
        return (copy,)


class Attention:
    """A node that patches the input of the blocks."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "make", "carom-test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    def make(self, model):
        copy = model.clone()

        def patch(args):
            return {**args, "img": args["img"] * 1.25}

        copy.set_model_patch(patch, "post_input")
        return (copy,)


class ImageAdapter:
    """A node with attention patches like an IP-Adapter's: additional keys and values, computed with its own weights."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "make", "carom-test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    def make(self, model):
        copy, made = model.clone(), {}

        def weight(rows, columns, like):
            if (rows, columns) not in made:
                generator = torch.Generator().manual_seed(rows + columns)
                made[rows, columns] = torch.randn(rows, columns, generator=generator) * 0.05
            return made[rows, columns].to(like)

        def beside(query, context, value, options):
            more = context @ weight(context.shape[-1], context.shape[-1], context)
            return query, torch.cat((context, more), 1), torch.cat((value, -more), 1)

        def after(out, options):
            return out + 0.5 * torch.tanh(out @ weight(out.shape[-1], out.shape[-1], out))

        copy.set_model_attn2_patch(beside)
        copy.set_model_attn2_output_patch(after)
        return (copy,)


class Inject:
    """A node that injects modules of its own into a UNet's blocks while it runs, as AnimateDiff-Evolved does.

    The modules are made in the node, so their parameters are inference tensors.
    """

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "make", "carom-test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    def make(self, model):
        from comfy.patcher_extension import PatcherInjection

        class Motion(torch.nn.Module):
            def __init__(self, seed):
                super().__init__()
                generator = torch.Generator().manual_seed(seed)
                self.mix = torch.nn.Conv2d(320, 320, 1)
                with torch.no_grad():
                    self.mix.weight.copy_(torch.randn(320, 320, 1, 1, generator=generator) * 0.05)
                    self.mix.bias.zero_()

            def forward(self, x):
                return x + self.mix(x)

        copy = model.clone()
        modules = [Motion(1), Motion(2)]

        def blocks(patcher):
            unet = patcher.model.diffusion_model
            return unet.input_blocks[1], unet.output_blocks[0]

        def inject(patcher):
            for block, module in zip(blocks(patcher), modules, strict=True):
                block.append(module)

        def eject(patcher):
            for block in blocks(patcher):
                del block[-1]

        copy.set_injections("motion", [PatcherInjection(inject=inject, eject=eject)])
        return (copy,)


class Compile:
    """A node that applies torch.compile through ComfyUI's own wrapper, with the eager backend (no compiler is
    needed).
    """

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "make", "carom-test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    def make(self, model):
        from comfy_api.torch_helpers import set_torch_compile_wrapper

        copy = model.clone()
        set_torch_compile_wrapper(model=copy, backend="eager")
        return (copy,)


class CompileNode:
    """ComfyUI's own node TorchCompileModel, with the eager backend, which its list of backends does not have."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "make", "carom-test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    def make(self, model):
        import nodes

        return nodes.NODE_CLASS_MAPPINGS["TorchCompileModel"].execute(model, "eager").args


class CompileBlocks:
    """A node that compiles each block and adds it as an object patch, as other packs' compile nodes do (eager
    backend).
    """

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "make", "carom-test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    def make(self, model):
        copy = model.clone()
        for index in range(len(model.model.diffusion_model.double_blocks)):
            # The block of an earlier prompt may still be in the model; this returns the original.
            name = f"diffusion_model.double_blocks.{index}"
            copy.add_object_patch(name, torch.compile(copy.get_model_object(name), backend="eager"))
        return (copy,)


def low_vram(copy):
    """Let the patcher ``copy`` use ComfyUI's own low-VRAM path. Dynamic patchers apply patches on the fly anyway."""
    own = type(copy)

    def load(self, device_to=None, *args, **kwargs):
        import comfy.model_patcher

        if self.is_dynamic():  # its load has an argument that says when patches changed
            return own.load(self, device_to, *args, **kwargs)
        if self.model.current_weight_patches_uuid is None:
            # Marks of a whole load with forced casts, because of which ComfyUI's low-VRAM load attaches no patch.
            for module in self.model.modules():
                comfy.model_patcher.wipe_lowvram_weight(module)
        return own.load(self, device_to, 1, False, False)

    copy.__class__ = type("LowVram" + own.__name__, (own,), {"load": load})
    return copy


class LowVram:
    """A node that uses ComfyUI's own low-VRAM path, which applies patches at each use and is the reference for that."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "make", "carom-test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    def make(self, model):
        return (low_vram(model.clone()),)


class LowVramClip:
    """The same for a text encoder, which is unloaded first, because its loader has loaded it whole."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("CLIP",), "make", "carom-test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"clip": ("CLIP",)}}

    def make(self, clip):
        copy = clip.clone()
        copy.patcher.detach()
        low_vram(copy.patcher)
        return (copy,)


class ShortOfMemory:
    """A node that lets LoRA's matrix products raise OutOfMemory while the model's budget exceeds ``most`` bytes.

    ``most``: 0 for no such limit. The errors are counted.
    """

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "make", "carom-test"
    own, errors = torch.mm, [0]

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "most": ("INT", {"default": 0, "max": 1 << 40})}}

    @classmethod
    def IS_CHANGED(cls, **_):
        return float("nan")

    def make(self, model, most):
        @torch.overrides.wrap_torch_function(lambda *args, **options: args)
        def mm(*args, **options):
            session = getattr(model.model.__dict__.get("_carom_streaming"), "session", None)
            if session is not None and session.vram > most:
                self.errors[0] += 1
                raise torch.OutOfMemoryError("as if")
            return ShortOfMemory.own(*args, **options)

        self.errors[0] = 0
        torch.mm = mm if most else self.own
        return (model,)


class Squeeze:
    """A node that asks the loaded model for VRAM, as ComfyUI does if another model needs memory."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("LATENT",), "make", "carom-test"

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {"latent": ("LATENT",), "model": ("MODEL",), "share": ("FLOAT", {"default": 0.5})}
        }

    def make(self, latent, model, share):
        model.partially_unload(model.offload_device, int(model.loaded_size() * share))
        return (latent,)


class Listen:
    """A node that starts to record the messages that the page gets while a node runs, for Heard."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "make", "carom-test"
    told: dict = {"bar": [], "text": []}
    undo: list = []

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

    @classmethod
    def IS_CHANGED(cls, **_):
        return float("nan")

    def make(self, model):
        import comfy.utils
        from server import PromptServer

        page, hook, send = (
            PromptServer.instance,
            comfy.utils.PROGRESS_BAR_HOOK,
            PromptServer.instance.send_progress_text,
        )

        def bar(value, total, *args, **kwargs):
            self.told["bar"].append([int(value), int(total)])
            return hook(value, total, *args, **kwargs)

        def text(words, node, *args, **kwargs):
            self.told["text"].append([str(words), str(node)])
            return send(words, node, *args, **kwargs)

        self.told.update(bar=[], text=[])
        comfy.utils.set_progress_bar_global_hook(bar)
        page.send_progress_text = text
        self.undo.append(lambda: comfy.utils.set_progress_bar_global_hook(hook))
        self.undo.append(lambda: page.__dict__.pop("send_progress_text"))
        return (model,)


class Heard:
    """A node that returns the messages recorded since Listen."""

    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "tell", "carom-test", True

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"value": (ANY,)}}

    @classmethod
    def IS_CHANGED(cls, **_):
        return float("nan")

    def tell(self, value):
        while Listen.undo:
            Listen.undo.pop()()
        return {"ui": {name: list(found) for name, found in Listen.told.items()}}


class Mapped:
    """A node that returns a model in the state in which ComfyUI's dynamic loaders leave it.

    Weights are in the mapped file, in the file's dtype, and are to be used in another dtype. ``streams``: whether
    Carom streams the model, as its loaders do. Otherwise ComfyUI's own patcher uses it, with the weights in the
    dtypes in which dynamic VRAM copies them to the device (modules of up to 16 KiB are copied unchanged and cast at
    every use).
    """

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "make", "carom-test"

    @classmethod
    def INPUT_TYPES(cls):
        text = ("STRING", {"default": ""})
        return {"required": {"unet_name": text, "dtype": text, "vram": text, "streams": ("BOOLEAN", {})}}

    def make(self, unet_name, dtype, vram, streams):
        import comfy.model_base
        import comfy.sd
        import folder_paths
        from safetensors.torch import load_file

        path = folder_paths.get_full_path("diffusion_models", unet_name)
        base, meant = comfy.model_base.BaseModel, getattr(torch, dtype)
        own = base.load_model_weights
        base.load_model_weights = lambda model, sd, prefix="", assign=False: own(
            model, sd, prefix, assign=True
        )
        try:
            patcher = comfy.sd.load_diffusion_model_state_dict(
                load_file(path), model_options={"dtype": meant}
            )
        finally:
            base.load_model_weights = own
        dtypes = {p.dtype for p in patcher.model.parameters()}
        assert dtypes - {meant}, "the loader has converted already"
        if not streams:
            for module in patcher.model.modules():
                nbytes = sum(p.numel() * p.element_size() for p in module.parameters(recurse=False))
                if not hasattr(module, "comfy_cast_weights") or nbytes > 16 << 10:
                    for name, value in list(module.named_parameters(recurse=False)):
                        setattr(
                            module, name, torch.nn.Parameter(value.detach().to(meant), requires_grad=False)
                        )
            return (patcher,)
        import sys

        import nodes

        own_nodes = nodes.NODE_CLASS_MAPPINGS["CaromOffload"].__module__
        offload = sys.modules[own_nodes.replace("offload_nodes", "convert_patchers")]
        settings = offload.Settings("stream", vram)
        return (offload.wear(offload._static(patcher), settings),)


class Picture:
    """A node that returns a random image."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("IMAGE",), "make", "carom-test"

    @classmethod
    def INPUT_TYPES(cls):
        size = ("INT", {"default": 64, "min": 8})
        return {"required": {"width": size, "height": size, "seed": ("INT", {"default": 0})}}

    def make(self, width, height, seed):
        return (torch.rand(1, height, width, 3, generator=torch.Generator().manual_seed(seed)),)


class Alive:
    """A node that reports how many models are in memory, and switches Python's automatic collections on or off."""

    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "tell", "carom-test", True

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"value": (ANY,), "collects": ("BOOLEAN", {"default": True})}}

    @classmethod
    def IS_CHANGED(cls, **_):
        return float("nan")

    def tell(self, value, collects):
        import gc

        import comfy.model_base

        (gc.enable if collects else gc.disable)()
        models = [found for found in gc.get_objects() if isinstance(found, comfy.model_base.BaseModel)]
        return {"ui": {"models": [len(models)]}}


NODE_CLASS_MAPPINGS = {
    "CaromTest" + node.__name__: node
    for node in (
        Conditioning,
        Latent,
        Hash,
        Fails,
        Slow,
        Attention,
        ImageAdapter,
        Inject,
        Compile,
        CompileNode,
        CompileBlocks,
        LowVram,
        LowVramClip,
        ShortOfMemory,
        Squeeze,
        Listen,
        Heard,
        Mapped,
        Picture,
        Alive,
    )
}

if __name__ != "comfy_test_nodes":  # the maker of the models imports it for the sizes alone
    shrink_text_encoders()
