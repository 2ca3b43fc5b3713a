"""Engine of `carom plan`: predicts the speed and memory of a model on a machine, without loading or running
anything.
"""
