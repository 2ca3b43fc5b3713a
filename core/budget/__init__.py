"""How much memory weights may take, and which session gives memory up first.

May import `common`, `device` and `model`. Main names: `SharedBudget`, `Governor`.
"""
