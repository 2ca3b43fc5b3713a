"""The module tree: units, managed tensors, quantised weights, and the wrapping of forwards.

May import `device`, `plan` and `common`. Main names: `Unit`, `Carving`, `Home`, `FlattenedWeights`.
"""
