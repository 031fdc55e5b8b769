"""From a session's tree to the samples that are trained on: which leaves, and every token once.

It reads the columns and changes nothing; rewards are the trajectory's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from miles.session.flat import Column
from miles.session.turns import Node
from miles.types import Array, Finish, Sample, Span

__all__ = ["kept_leaves", "pieces", "samples"]


def pieces(path: Sequence[Node]) -> list[tuple[int, int]]:
    """Where the tokens of a path lie, neighbours joined."""
    found: list[tuple[int, int]] = []
    for node in path:
        if found and found[-1][1] == node.start:
            found[-1] = (found[-1][0], node.stop)
        else:
            found.append((node.start, node.stop))
    return found


def kept_leaves(nodes: Collection[Node], policy: str) -> list[Node]:
    """Leaves that become samples, in the order of their turns: `all`; without those that another
    attempt at the same request took the place of (`drop_retries`: one that was continued, or else
    the latest, stays); or the one with the most tokens (`longest`)."""
    leaves = [n for n in nodes if not n.continued]
    if len(leaves) == 1:
        return leaves
    leaves.sort(key=lambda n: n.index)
    if policy == "longest" and leaves:
        return [max(leaves, key=lambda n: (n.size, n.index))]
    if policy == "drop_retries":
        roots = [n for n in nodes if n.parent is None]
        return [leaf for leaf in leaves if not _retried(leaf, roots)]
    return leaves


def _retried(leaf: Node, roots: Sequence[Node]) -> bool:
    siblings = leaf.parent.children if leaf.parent else roots
    return not leaf.children and any(
        other is not leaf
        and (other.children or other.index > leaf.index)
        and other.messages == leaf.messages
        and other.tools == leaf.tools
        for other in siblings
    )


def samples(leaves: Sequence[Node], columns: Mapping[str, Column]) -> tuple[Sample, ...]:
    """One per leaf; a turn on several paths is trainable in the first."""
    if len(leaves) == 1:
        return (_sample(leaves[0].token_path(), columns, None),)
    owned: set[int] = set()
    made = []
    for leaf in leaves:
        path = leaf.token_path()
        made.append(_sample(path, columns, owned))
        owned.update(node.index for node in path)
    return tuple(made)


def _sample(path: Sequence[Node], columns: Mapping[str, Column], owned: set[int] | None) -> Sample:
    leaf = path[-1]
    sampled = np.zeros(leaf.size, np.bool_)  # (tokens,) bool
    trainable = np.zeros(leaf.size, np.bool_) if owned else sampled  # (tokens,) bool
    spans: list[Span] = []
    images: tuple[bytes, ...] = ()
    cut = False
    for node in path:
        stop = node.size
        start = stop - (node.stop - node.split)
        sampled[start:stop] = True
        if owned and node.index not in owned:
            trainable[start:stop] = True
        for s in node.spans:
            spans.append(Span(start=start + s.start, stop=start + s.stop, version=s.version))
        images += node.images
        cut = cut or node.truncated_logprobs >= 0
    finish: Finish = "length" if leaf.truncated else leaf.finish
    return Sample(
        tokens=columns["tokens"].copy(pieces(path)),  # (tokens,) int32
        sampled=sampled,
        trainable=trainable,
        logprobs=_scatter(path, columns, "logprobs"),
        spans=tuple(spans),
        finish=finish,
        truncated_logprobs=_scatter(path, columns, "truncated_logprobs") if cut else None,
        experts=_scatter(path, columns, "experts") if leaf.experts >= 0 else None,
        images=images,
    )


def _scatter(path: Sequence[Node], columns: Mapping[str, Column], name: str) -> Array | None:
    """(tokens, ...) with each turn's rows in their place and 0 elsewhere; None if any has none. The
    cut distribution's log-probs are the full one's where nothing was cut."""
    out: Array | None = None
    for node in path:
        row, found = getattr(node, name), name
        if row < 0 and name == "truncated_logprobs":
            row, found = node.logprobs, "logprobs"
        if row < 0:
            return None
        if not (size := node.stop - node.split):
            continue
        rows = columns[found].rows(row, row + size)
        if out is None:
            out = np.zeros((path[-1].size, *rows.shape[1:]), rows.dtype)
        out[node.size - size : node.size] = rows
    if out is None and name == "logprobs":  # completions without a token
        return np.zeros(path[-1].size, np.float32)
    return out
