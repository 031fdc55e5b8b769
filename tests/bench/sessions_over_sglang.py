"""Token-exact sessions over a running SGLang server, checked against `transformers`.

    python tests/bench/sessions_over_sglang.py --url http://127.0.0.1:30000 --model DIR

Starts `miles sessions serve` in front of the server, lets conversations of several turns run over
it at once with the official OpenAI client, half of them streamed, and asks for their samples. Each
sample must begin with the rendered first prompt, repeat every turn's text, and have the log-probs
that `transformers` gives its tokens. Exit 1 on a mismatch, a lost turn, or a mean difference of
log-probs above 0.02 nats.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai

LIMIT = 0.02  # nats, mean: a server in bf16 against float32


async def converse(admin: httpx.AsyncClient, address: str, index: int, turns: int) -> Any:
    """One session; its texts and its samples."""
    opened = (await admin.post("/sessions")).json()
    id, token = opened["session_id"], opened["token"]
    client = openai.AsyncOpenAI(base_url=f"{address}/sessions/{id}/v1", api_key=token)
    said: list[Any] = [{"role": "user", "content": f"{index}+{index}="}]
    for turn in range(turns):
        asked: dict[str, Any] = {"model": "policy", "messages": said, "max_tokens": 12}
        if index % 2:
            stream = await client.chat.completions.create(**asked, stream=True)
            parts = [c.choices[0].delta.content or "" async for c in stream if c.choices]
            text = "".join(parts)
        else:
            text = (await client.chat.completions.create(**asked)).choices[0].message.content or ""
        said += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": f"and {turn}?"},
        ]
    own = {"Authorization": f"Bearer {token}"}
    samples = (await admin.post(f"/sessions/{id}/samples", json={}, headers=own)).json()
    await client.close()
    return [m["content"] for m in said if m["role"] == "assistant"], samples["samples"]


def compare(results: list[Any], directory: str) -> dict[str, float]:
    """Samples against the model itself."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    gaps, lost, unlike = [], 0, 0
    for texts, samples in results:
        (sample,) = samples
        tokens = np.array(sample["tokens"])
        trainable = np.array(sample["trainable"], bool)
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens)[None]).logits[0].double().log_softmax(-1)
        mine = logits[:-1].gather(1, torch.from_numpy(tokens[1:])[:, None])[:, 0].numpy()
        gaps.append(np.abs(mine - np.array(sample["logprobs"])[1:])[trainable[1:]])
        starts = np.flatnonzero(trainable & ~np.roll(trainable, 1))
        lost += len(texts) - len(starts)
        for text, start in zip(texts, starts, strict=False):
            size = np.argmin(np.append(trainable[start:], False))  # up to the turn's end
            said = tokenizer.decode(tokens[start : start + size], skip_special_tokens=False)
            if _plain(said.removesuffix(tokenizer.eos_token)) != _plain(text):
                unlike += 1
                print(f"tokens say {said!r}, the answer was {text!r}", file=sys.stderr)
    gap = np.concatenate(gaps)
    return {
        "sessions": len(results),
        "sampled_tokens": len(gap),
        "lost_turns": lost,
        "texts_not_in_tokens": unlike,
        "logprob_abs_mean": float(gap.mean()),
        "logprob_abs_max": float(gap.max()),
    }


def _plain(text: str) -> str:
    """Without outer white space, and without marks for what is no text (bytes, ids of a padded
    vocabulary), of which decoders write different numbers."""
    return text.replace("\ufffd", "").strip()


async def talk(address: str, admin_token: str, sessions: int, turns: int) -> tuple[list[Any], Any]:
    headers = {"Authorization": f"Bearer {admin_token}"}
    async with httpx.AsyncClient(base_url=address, headers=headers, timeout=120) as admin:
        talks = (converse(admin, address, i, turns) for i in range(sessions))
        results = list(await asyncio.gather(*talks))
        return results, (await admin.get("/sessions")).json()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--turns", type=int, default=6)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="miles-bench-") as folder:
        command = [sys.executable, "-m", "miles", "sessions", "serve", f"engine.url={args.url}"]
        command += [f"model.path={args.model}", "port=0", f"run.dir={folder}", "temperature=1.0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            words = ""
            while not (found := re.search(r"http://127\.0\.0\.1:\d+", words.partition("serv")[2])):
                line = server.stdout.readline() if server.stdout else ""
                if not line:
                    print(words, file=sys.stderr)
                    return 1
                words += line
            token = (Path(folder) / "sessions" / "admin_token").read_text().strip()
            results, state = asyncio.run(talk(found.group(0), token, args.sessions, args.turns))
        finally:
            server.terminate()
            server.wait(30)
    figures = compare(results, args.model)
    figures["token_mismatches"] = state["metrics"]["session/token_mismatches"]
    print(json.dumps(figures, indent=2))
    good = figures["lost_turns"] == figures["texts_not_in_tokens"] == 0
    return (
        0 if good and not figures["token_mismatches"] and figures["logprob_abs_mean"] < LIMIT else 1
    )


if __name__ == "__main__":
    raise SystemExit(main())
