"""A small OpenEnv environment, laid out as OpenEnv packages are: find a number by its hints."""
