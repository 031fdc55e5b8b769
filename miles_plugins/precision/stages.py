"""The identity of a precision recipe: a digest of its stages.

The budget is left out, because it says what is tolerated and not what is computed.
"""

from __future__ import annotations

import hashlib

from miles import Precision

__all__ = ["fingerprint"]


def fingerprint(recipe: Precision) -> str:
    """16 hex digits of BLAKE2b over `stage=type` of the four stages and of the two places within
    them that may be finer."""
    stages = ("master", "compute", "engine", "export", "residual", "logits")
    text = "\n".join(f"{stage}={getattr(recipe, stage)}" for stage in stages)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
