"""What weights cross on their way to the device: the codecs' decoders, and files on disk."""
