"""Environments of the verifiers library for miles (`environment`, `driving`), and a small one of
our own (`reverse_words`)."""
