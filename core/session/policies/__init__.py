"""Policies: each decides between steps whether another layout is wanted. None of them imports another.

Main names: `Policy` and `Observation` (in `policy`), and one file for each policy.
"""
