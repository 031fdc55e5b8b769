"""Where metrics go: the built-in trackers, one module each."""
