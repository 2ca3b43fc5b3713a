"""Helpers for every other package: exception classes, byte sizes, progress callbacks, and host memory on huge
pages.

May import torch only. Main names: `CaromError` and its subclasses, `format_size`, `parse_size`.
"""
