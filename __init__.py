"""Carom: models larger than VRAM, weights bouncing through a few device slots while the GPU computes."""

__version__ = "0.1.0"
