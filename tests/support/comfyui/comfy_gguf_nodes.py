"""A custom node pack for tests of the real server: loads GGUF files through gguf-py, which maps them into memory.

It stands in for packs such as ComfyUI-GGUF: weights keep their blocks in a tensor subclass over the mapped file, and each
use dequantises them.
"""

import torch


class Blocks(torch.Tensor):
    """The bytes of a tensor in GGUF's blocks. ``kind``: the type of the blocks; ``size``: the shape of the weight."""

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
        if tensor.tensor_type == gguf.GGMLQuantizationType.F32:
            found[tensor.name] = data.view(size)
        else:
            blocks = data.as_subclass(Blocks)
            blocks.kind, blocks.size = tensor.tensor_type, size
            found[tensor.name] = blocks
    return found


def operations():
    import comfy.ops
    import gguf

    class Operations(comfy.ops.manual_cast):
        class Linear(comfy.ops.manual_cast.Linear):
            def _load_from_state_dict(self, state_dict, prefix, *_):
                for name in ("weight", "bias"):
                    if f"{prefix}{name}" in state_dict:
                        tensor = torch.nn.Parameter(state_dict[f"{prefix}{name}"], requires_grad=False)
                        setattr(self, name, tensor)

            def forward_comfy_cast_weights(self, input, *args, **kwargs):
                if not isinstance(self.weight, Blocks):
                    return super().forward_comfy_cast_weights(input, *args, **kwargs)
                plain = self.weight.as_subclass(torch.Tensor).cpu().numpy()
                values = gguf.quants.dequantize(plain, self.weight.kind)
                weight = torch.from_numpy(values).reshape(self.weight.size).to(input)
                bias = None if self.bias is None else self.bias.to(input)
                return torch.nn.functional.linear(input, weight, bias)

    return Operations


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
        return (comfy.sd.load_diffusion_model_state_dict(read(path), model_options=options),)


NODE_CLASS_MAPPINGS = {"CaromTestLoadGGUF": LoadGGUF}
