"""Benchmarks of Carom: against other offloaders (engines), in ComfyUI and ai-toolkit (hosts), and of codecs and disk
reads (tiers).

The folder `records/` keeps the results of runs.
"""
