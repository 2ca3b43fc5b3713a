"""Measurements of Carom: of engines beside each other, in the real hosts, and of the tiers weights cross. Runs are kept in `records/`."""
