"""Reading of safetensors files: an index of their tensors, the mapping to a module, and prioritised direct
reads.

May import `codec` and `common`. Main names: `Index`, `DiskReader`, `load_file`.
"""
