"""Torch code that trainer backends share: log-probs, losses, packing, mismatch. It trains nothing
by itself.

Nothing is imported here, so that importing one part costs only that part.
"""
