"""Built-in trainers, one package a name."""
