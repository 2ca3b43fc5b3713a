"""Stock beside Carom in the real ComfyUI and the real ai-toolkit, each an unmodified process of its own."""
