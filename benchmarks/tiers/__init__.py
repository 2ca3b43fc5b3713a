"""Benchmarks of the codecs' decoders, and of weights that are read from disk."""
