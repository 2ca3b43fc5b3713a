"""Engines of commands: the planner, the doctor and the packer.

This package may import `core`, but `core` never imports `tools`.
"""
