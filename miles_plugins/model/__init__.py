"""Built-in model families; registrations are light, building a module is in `build`."""
