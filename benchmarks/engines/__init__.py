"""The comparison of Carom with no offloading, with the roofline and with installed peers; each case runs in a new
process.
"""
