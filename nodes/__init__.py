"""ComfyUI nodes: they translate between ComfyUI's patchers and a Carom session, and decide nothing themselves."""
