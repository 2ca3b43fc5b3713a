"""Where the bytes of streamed weights lie: the interface of such a store, and the copies to slots."""
