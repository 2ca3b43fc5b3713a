"""A custom node pack for tests of the real server: loads GGUF files through gguf-py, which maps them into memory.

It stands in for packs such as ComfyUI-GGUF: weights keep their blocks in a tensor subclass over the mapped file, and each
use dequantises them. Patches (LoRA) are attributes of the weights, and each use applies them after dequantisation.
"""

import torch

PLAIN = ("F32", "F16")  # types whose tensors torch computes with


class Blocks(torch.Tensor):
    """The bytes of a tensor in GGUF's blocks, or a tensor of a plain type, which is of this class too.

    ``kind``: the type of the blocks; ``size``: the shape of the weight; ``patches``: ComfyUI's patches of the weight;
    ``key``: its name in ComfyUI.
    """

    @property
    def shape(self):
        return self.__dict__.get("size", super().shape)

    def to(self, *args, **kwargs):
        return like(self, super().to(*args, **kwargs))

    def detach(self):
        return like(self, super().detach())

    def clone(self, *args, **kwargs):
        return like(self, super().clone(*args, **kwargs))


def like(source, made):
    made = made.as_subclass(Blocks)
    made.__dict__.update(source.__dict__)
    return made


def read(path):
    """Return the tensors of a GGUF file by name. They are views of the mapped file."""
    import warnings

    import gguf

    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        size = torch.Size(int(n) for n in reversed(tensor.shape))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of memory that is not writable
            data = torch.from_numpy(tensor.data)
        if tensor.tensor_type.name in PLAIN:
            data = data.view(size)
        blocks = data.as_subclass(Blocks)
        blocks.kind, blocks.size = tensor.tensor_type, size
        found[tensor.name] = blocks
    return found


def quantised(tensor):
    return isinstance(tensor, Blocks) and tensor.kind.name not in PLAIN


def operations():
    import comfy.lora
    import comfy.ops
    import gguf

    class Operations(comfy.ops.manual_cast):
        class Linear(comfy.ops.manual_cast.Linear):
            def _load_from_state_dict(self, state_dict, prefix, *_):
                for name in ("weight", "bias"):
                    if f"{prefix}{name}" in state_dict:
                        tensor = torch.nn.Parameter(state_dict[f"{prefix}{name}"], requires_grad=False)
                        setattr(self, name, tensor)

            def _save_to_state_dict(self, destination, prefix, keep_vars):
                # As in ComfyUI-GGUF: names and sizes only of quantised weights. ComfyUI finds what a LoRA names here.
                if not (quantised(self.weight) or quantised(self.bias)):
                    super()._save_to_state_dict(destination, prefix, keep_vars)
                    return
                for name in ("weight", "bias"):
                    tensor = getattr(self, name)
                    if tensor is not None:
                        destination[f"{prefix}{name}"] = torch.zeros_like(tensor, device="meta")

            def forward_comfy_cast_weights(self, input, *args, **kwargs):
                if not quantised(self.weight):
                    return super().forward_comfy_cast_weights(input, *args, **kwargs)
                plain = self.weight.as_subclass(torch.Tensor).cpu().numpy()
                values = gguf.quants.dequantize(plain, self.weight.kind)
                weight = torch.from_numpy(values).reshape(self.weight.size)
                patches = getattr(self.weight, "patches", [])
                if patches:
                    weight = comfy.lora.calculate_weight(patches, weight, self.weight.key)
                weight = weight.to(input)
                bias = None if self.bias is None else self.bias.to(input)
                return torch.nn.functional.linear(input, weight, bias)

    return Operations


def patcher_class():
    import comfy.model_patcher
    import comfy.utils

    class BlocksPatcher(comfy.model_patcher.ModelPatcher):
        """A patcher that writes patches to the attributes of `Blocks` weights."""

        def load(self, device_to=None, lowvram_model_memory=0, force_patch_weights=False, *args, **kwargs):
            # ComfyUI's low-VRAM load calls `patch_weight_to_device` only if this argument is true.
            return super().load(device_to, lowvram_model_memory, True, *args, **kwargs)

        def patch_weight_to_device(self, key, device_to=None, *args, **kwargs):
            weight = comfy.utils.get_attr(self.model, key)
            if not quantised(weight):
                super().patch_weight_to_device(key, device_to, *args, **kwargs)
            elif key in self.patches:
                patched = weight.to(device_to)
                patched.patches, patched.key = self.patches[key], key
                comfy.utils.set_attr_param(self.model, key, patched)

        def unpatch_model(self, device_to=None, unpatch_weights=True):
            if unpatch_weights:
                for weight in self.model.parameters():
                    if quantised(weight):
                        weight.patches = []
            return super().unpatch_model(device_to, unpatch_weights)

    return BlocksPatcher


class LoadGGUF:
    """A node that loads a diffusion model from a GGUF file."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "make", "carom-test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"unet_name": ("STRING", {"default": ""})}}

    def make(self, unet_name):
        import comfy.sd
        import folder_paths

        path = folder_paths.get_full_path("diffusion_models", unet_name)
        options = {"custom_operations": operations(), "dtype": torch.float32}
        patcher = comfy.sd.load_diffusion_model_state_dict(read(path), model_options=options)
        patcher.__class__ = patcher_class()
        return (patcher,)


NODE_CLASS_MAPPINGS = {"CaromTestLoadGGUF": LoadGGUF}
