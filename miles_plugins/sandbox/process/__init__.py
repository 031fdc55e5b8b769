"""Boxes in namespaces of this machine's kernel, made by bubblewrap: `sandbox=process`."""

from miles_plugins.sandbox.process.sandbox import Process

__all__ = ["Process"]
