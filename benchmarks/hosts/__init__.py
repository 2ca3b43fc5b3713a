"""Benchmarks of stock offloading against Carom in the real ComfyUI and ai-toolkit, each an unmodified process."""
