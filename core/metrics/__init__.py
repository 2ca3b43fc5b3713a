"""Measurement of sessions: a meter that counts bytes and times steps, the report, and its pictures.

May import `device` and `plan`. Main names: `Meter`, `Report`.
"""
