"""Engine of `carom pack`: rewrites a safetensors checkpoint in order of use, optionally compressed or
quantised.
"""
