"""`carom.stream`: a session lays weights out, follows memory and measured times, and reports.

May import every other package of `core`. Main names: `stream`, `Session`.
"""
