"""`miles sessions serve`: session servers alone, over an engine that somebody else runs."""
