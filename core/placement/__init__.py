"""Where each tensor of a module is kept (device memory, pinned host memory, a file), and how a unit's bytes
are copied to a slot.

May import `codec`, `checkpoint`, `host`, `device`, `model` and `metrics`. Main names: `Placement` (all
tensors of a layout), `Tier` (all streamed units), `Backing` (one streamed unit), `register_store` (the table
of the kinds of stores).
"""
