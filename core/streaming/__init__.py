"""Device slots of streamed units at run time: acquired, prefetched, used in forward and backward passes, and
released.

May import `plan`, `device`, `model`, `metrics` and `placement`. Main name: `Streamer`.
"""
