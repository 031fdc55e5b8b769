"""Built-in engines; nothing here is private to miles: each comes in through its entry point."""
