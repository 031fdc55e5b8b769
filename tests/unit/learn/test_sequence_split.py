"""Ranks that share a row: what is exchanged comes back, and attention is that of one rank."""

from __future__ import annotations

import subprocess
import sys

import pytest

RANK = """
import os
import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from miles.learn.sequence_split import Split

rank, world, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)

def attend(q, k, v):
    made = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return made.transpose(1, 2)

def check():
    draw = torch.Generator().manual_seed(0)
    for tokens, heads, keys in ((7, 6, 3), (2, 3, 1), (12, 12, 6), (1, 6, 6)):
        q, k, v = (
            torch.randn(1, n, tokens, 4, generator=draw, dtype=torch.float64).requires_grad_()
            for n in (heads, keys, keys)
        )
        split = Split.of(tokens, dist.group.WORLD)
        assert split.edges[0] == 0 and split.edges[-1] == tokens
        wanted = attend(q, k, v)
        toward = torch.randn(wanted.shape, generator=draw, dtype=torch.float64)
        expected = torch.autograd.grad((wanted * toward).sum(), (q, k, v))
        parts = [x.detach()[:, :, split.own].clone().requires_grad_() for x in (q, k, v)]
        exchanged = [split.to_heads(part) for part in parts]
        assert torch.equal(split.to_tokens(exchanged[0].transpose(1, 2)), parts[0].transpose(1, 2))
        found = split.to_tokens(attend(*exchanged))
        torch.testing.assert_close(found, wanted[:, split.own], rtol=1e-12, atol=1e-12)
        gradients = torch.autograd.grad((found * toward[:, split.own]).sum(), parts)
        for one, whole in zip(gradients, expected, strict=True):
            torch.testing.assert_close(one, whole[:, :, split.own], rtol=1e-12, atol=1e-12)

check()
dist.destroy_process_group()
os._exit(0)  # as workers do: threads of a group may abort an interpreter that takes itself down
"""


@pytest.mark.slow
def test_shared_attention_and_its_gradients_are_those_of_one_rank(tmp_path):
    """Rows of unlike stretches and empty ones, as many key heads as ranks, fewer and more."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), "3", str(tmp_path / "meeting")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    said = [process.communicate(timeout=120)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0, 0], "\n".join(said)
