"""Peak memory of chunked log-probs, forward and backward, against the plain implementation.

    python tests/bench/logprob_memory.py            # 8192 tokens x 151936 vocabulary; plain takes
    about 15 GB python tests/bench/logprob_memory.py --tokens 2048 --vocab 37500

Each implementation runs alone in a process; what counts is its peak resident set less that of a
process that only makes the inputs.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time

WAYS = ("nothing", "chunked", "plain")


def measure(way: str, tokens: int, vocab: int, hidden: int) -> None:
    """Run one implementation and print peak MiB and CPU seconds."""
    import torch

    from miles.learn.logprobs import token_logprobs

    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden_RH = torch.randn(tokens, hidden, requires_grad=True)
    head_VH = torch.randn(vocab, hidden).mul_(hidden**-0.5).requires_grad_()
    targets_R = torch.randint(0, vocab, (tokens,))
    began = time.process_time()
    if way == "chunked":
        found_R, _ = token_logprobs(hidden_RH, head_VH, targets_R)
        found_R.sum().backward()
    elif way == "plain":
        logits_RV = (hidden_RH @ head_VH.t()).float()
        found_R = logits_RV.log_softmax(-1).gather(1, targets_R[:, None])[:, 0]
        found_R.sum().backward()
    else:
        hidden_RH.grad, head_VH.grad = torch.zeros_like(hidden_RH), torch.zeros_like(head_VH)
    seconds = time.process_time() - began
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, seconds)


def main() -> None:
    """Measure every way and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--way", choices=WAYS)
    args = parser.parse_args()
    if args.way:
        measure(args.way, args.tokens, args.vocab, args.hidden)
        return
    peak = {}
    for way in WAYS:
        sizes = [f"--{n}={getattr(args, n)}" for n in ("tokens", "vocab", "hidden")]
        done = subprocess.run(
            [sys.executable, __file__, f"--way={way}", *sizes],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        peak[way], seconds = map(float, done.stdout.split())
        print(f"{way}: peak {peak[way]:.0f} MiB, {seconds:.1f} CPU s")
    chunked, plain = (peak[way] - peak["nothing"] for way in ("chunked", "plain"))
    print(f"{args.tokens} tokens x {args.vocab} vocabulary, beyond the inputs and their gradients:")
    print(f"chunked {chunked:.0f} MiB, plain {plain:.0f} MiB, ratio {chunked / plain:.3f}")


if __name__ == "__main__":
    main()
