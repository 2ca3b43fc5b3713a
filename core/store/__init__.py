"""Where bytes wait: host memory now; files join it in `index`, `reader` and `writer`."""
