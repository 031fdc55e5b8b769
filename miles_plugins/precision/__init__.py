"""Built-in precision recipes: plain data that every process reads."""
