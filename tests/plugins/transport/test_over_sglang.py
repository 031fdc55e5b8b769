"""Weights written into the real SGLang on a CPU over its own routes: what it then says is what the
trainer's weights say.

`tests/sglang_cpu/install.sh` makes its environment; MILES_TEST_SGLANG names its interpreter.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from miles import Context, Request, Sampling
from miles.testing import FakeHandle
from miles_plugins.engine.sglang import Sglang
from miles_plugins.model.build import causal_lm
from miles_plugins.model.qwen3 import Qwen3
from miles_plugins.precision.fp32 import Fp32
from miles_plugins.transport.ipc import Ipc
from miles_plugins.transport.nccl import Nccl

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]
CHOICES = (
    (Ipc, {"bucket_bytes": 100_000}),
    (Nccl, {"bucket_bytes": 100_000, "backend": "gloo", "timeout_s": 120.0}),
)


class Trainer:
    def __init__(self, model):
        torch.manual_seed(0)
        self.module = causal_lm(model.hf_config(), None)

    def step(self):
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter += 0.05 * torch.randn_like(parameter)

    def export(self):
        yield from ((n, p.detach()) for n, p in self.module.named_parameters())

    def logprobs(self, tokens):
        ids = torch.from_numpy(tokens.astype(np.int64))
        with torch.no_grad():
            said = self.module(ids[None]).logits[0].double().log_softmax(-1)
        return said[:-1].gather(1, ids[1:, None])[:, 0].numpy()


def test_server_serves_what_was_published_by_handle_and_by_broadcast(sglang_python, tmp_path):
    context = Context(directory=tmp_path, precision=Fp32(Fp32.Config(), None))
    context = replace(context, model=Qwen3(Qwen3.Config(), context))
    source = Trainer(context.model)
    config = Sglang.Config(
        python=sglang_python,
        device="cpu",
        memory_fraction=0.1,
        max_running=8,
        flags={"max_total_tokens": 4096},
        environment={"OMP_NUM_THREADS": "1"},
    )
    tokens = np.arange(5, 45, dtype=np.int32)

    async def play():
        engine = Sglang(config, context)
        version = 0
        try:
            for kind, keys in CHOICES:

                def half(kind=kind, keys=keys):
                    return kind(kind.Config(**keys), context)

                trainer = FakeHandle("trainer", {"sender": half().sender(source)})
                engines = [FakeHandle("engine", {"receiver": half().receiver(engine)})]
                driver = half()
                for _ in range(2):  # the first is proven against a snapshot
                    version += 1
                    source.step()
                    await driver.publish(version, trainer=trainer, engines=engines)
                    assert await engine.version() == version
                    scored = await engine.score(tokens)
                    assert np.abs(scored[1:] - source.logprobs(tokens)).max() < 2e-3
                    sampling = Sampling(max_new_tokens=4)
                    request = Request(id="r", key="k", tokens=tokens, sampling=sampling, seed=0)
                    made = await engine.generate(request)
                    assert [span.version for span in made.spans] == [version]
        finally:
            await engine.close()

    asyncio.run(play())
