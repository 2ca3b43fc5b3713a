"""Device slots of streamed units at run time: acquired, prefetched, used in forward and backward passes, and
released.

Main names: `Runner` (the interface), `Streamer`, `Run`.
"""
