"""ComfyUI nodes. The nodes translate between ComfyUI's model patchers and Carom sessions."""
