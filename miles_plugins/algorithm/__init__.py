"""Built-in algorithms, one file a name: numpy over groups, no torch."""
