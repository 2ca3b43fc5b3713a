"""Engine of `carom doctor`: probes of the machine, and rules that turn the figures into findings with
remedies.
"""
