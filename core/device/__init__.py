"""Devices: engines that copy and order work (CUDA and HIP, any stream device, CPU, simulated), staging, VBAR memory.

May import `host`, `codec`, `plan` and `common`. Main names: `Engine`, `make_engine`, `SimulatedDevice`.
"""
