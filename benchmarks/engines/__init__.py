"""The bench: Carom beside no offloading, the roofline and installed peers, each case in a fresh process."""
