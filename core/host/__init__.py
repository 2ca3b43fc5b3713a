"""Host memory: pinned blocks of exact size, the RAM cache of weights read from files, and probes of the
machine's memory.

May import `checkpoint`, `codec` and `common`. Main names: `HostArena`, `HostCache`.
"""
