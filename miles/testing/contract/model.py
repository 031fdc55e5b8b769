"""What every model registration must do: agree with its own checkpoint, module, engine shape and
tito handler.

It reads no network and no real checkpoint; a random model of the registration's defaults is enough.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from miles.batch import flatten
from miles.errors import ConfigError
from miles.protocols import Decoder, Spec
from miles.testing.contract.case import Case, equal_json, expect, inapplicable
from miles.testing.samples import make_sample
from miles.types import Request, Sampling


def check_hf_config(case: Case) -> None:
    """Its `config.json` is plain JSON, a fresh one each time, and its own family's."""
    model = case.build()
    config = model.hf_config()
    expect(config.get("model_type"), "hf_config() has no model_type")
    back = equal_json(config, "hf_config()")
    config["model_type"] = "changed by the caller"
    expect(equal_json(model.hf_config(), "hf_config()") == back, "hf_config() gave a live object")
    expect(case.component.matches(back), "matches() is false for its own hf_config()")  # type: ignore[attr-defined]


def check_matches(case: Case) -> None:
    """It does not claim a family that nobody has, nor a config without one."""
    for config in ({"model_type": "no_such_family", "architectures": ["NoSuch"]}, {}):
        expect(not case.component.matches(config), f"matches({config}) is true")  # type: ignore[attr-defined]


def check_tito(case: Case) -> None:
    """The tito handler that it names exists, and its ids have rows in the embedding."""
    model = case.build()
    names = case.registry.names("tito")
    expect(type(model).tito in names, f"tito is {type(model).tito!r}; there are {', '.join(names)}")
    try:
        handler = case.registry.build(
            Spec(kind="tito", name=type(model).tito), replace(case.around(), model=model)
        )
    except ConfigError as error:
        inapplicable(f"its tito handler needs a checkpoint: {error}")
    rows = _decoder(model).vocab_size
    highest = max(int(handler.vocab_size) - 1, *handler.stop_ids)
    expect(highest < rows, f"its tito handler has id {highest}, the embedding has {rows} rows")


def check_module(case: Case) -> None:
    """`build()` gives a module in which the engine finds every tensor of `decoder()`, once, of the
    right shape."""
    from miles.testing.contract import reference

    model = case.build()
    wanted = dict(_tensors(_decoder(model)))
    found: dict[str, str] = {}
    for name, tensor in reference.names(reference.module(model)).items():
        mapped = model.engine_name(name)
        if mapped is None:
            continue
        expect(mapped in wanted, f"engine_name({name!r}) is {mapped!r}, which decoder() has not")
        expect(mapped not in found, f"{found.get(mapped)} and {name} are both {mapped}")
        found[mapped] = name
        shape = tuple(tensor.shape)
        expect(shape == wanted[mapped], f"{name} is {shape}, decoder() means {wanted[mapped]}")
    missing = sorted(set(wanted) - set(found))
    expect(not missing, f"no tensor of the module is the engine's {', '.join(missing[:4])}")
    stray = model.engine_name("no.such.tensor")  # its own name lets the engine refuse it
    expect(stray not in wanted, f"engine_name() makes {stray} of a name that it cannot know")


def check_module_seeded(case: Case) -> None:
    """A random model is the same for the same seed and finite everywhere."""
    import torch

    from miles.testing.contract import reference

    model = case.build()
    _decoder(model)
    one, two = (reference.names(reference.module(model, seed=3)) for _ in range(2))
    reference.expect_same(one, two, "two modules of one seed")
    bad = [name for name, tensor in one.items() if not torch.isfinite(tensor.float()).all()]
    expect(not bad, f"{', '.join(bad[:4])} not finite")


async def check_engine_agrees(case: Case) -> None:
    """The embedded engine, given the module's tensors, computes the module's log-probs."""
    from miles.testing.contract import reference

    model = case.build()
    _decoder(model)
    made = reference.noisy(reference.module(model))
    weights = {name: t.clone() for name, t in reference.names(made).items()}
    engine = case.companion("engine", model=model)
    await engine.load(0, weights.items())
    sample = make_sample(9, 24, vocab_size=_ids(case, model), seed=4)
    scored = await engine.score(sample.tokens)
    wanted = reference.logprobs(made, sample.tokens)
    worst = float(np.abs(scored - wanted).max())
    limit = case.companion("precision").budget.max
    expect(
        worst <= limit,
        f"engine and module differ by {worst:.3g} nats, at most {limit:g} is allowed",
    )
    greedy = Sampling(max_new_tokens=8, temperature=0.0)
    asked = Request(id="r", key="k", tokens=sample.tokens[:9], sampling=greedy, seed=0)
    completion = await engine.generate(asked)
    expect(len(completion.tokens), "the engine sampled nothing")


def check_trainer_packs(case: Case) -> None:
    """The trainer's packed forward gives the module's own log-probs of every sample: none sees its
    neighbours."""
    from miles.testing.contract import reference

    model = case.build()
    _decoder(model)
    trainer = case.companion("trainer", model=model)
    sizes = ((3, 5), (1, 2), (7, 11), (2, 1))
    vocab_size = _ids(case, model)
    samples = [
        make_sample(p, c, vocab_size=vocab_size, logprobs=False, seed=i)
        for i, (p, c) in enumerate(sizes)
    ]
    tokens = flatten(samples)
    packed = trainer.logprobs(tokens, "current")
    made = reference.module(model)
    made.load_state_dict(reference.as_tensors(trainer.export()), strict=False)
    worst = float(np.abs(packed - reference.packed_logprobs(made, tokens)).max())
    limit = case.companion("precision").budget.max
    expect(
        worst <= limit, f"packed and alone differ by {worst:.3g} nats, at most {limit:g} is allowed"
    )


def check_saved_model_returns(case: Case) -> None:
    """What the trainer saves as `model/`, `build()` and `transformers` load with the same
    tensors."""
    from transformers import AutoModelForCausalLM

    from miles.testing.contract import reference

    model = case.build()
    _decoder(model)
    trainer = case.companion("trainer", model=model)
    folder = case.folder("saved")
    trainer.save(folder)
    saved = json.loads((folder / "model" / "config.json").read_text())
    expect(case.component.matches(saved), "matches() is false for the saved config.json")  # type: ignore[attr-defined]
    wanted = {name: t.float() for name, t in reference.as_tensors(trainer.export()).items()}
    again = reference.resolve(model.build())(saved, folder / "model")
    theirs = AutoModelForCausalLM.from_pretrained(folder / "model")
    for who, made in (("build()", again), ("transformers", theirs)):
        found = reference.names(made.float())
        expect(set(found) >= set(wanted), f"{who} lacks {sorted(set(wanted) - set(found))[:4]}")
        reference.expect_same(
            wanted, {name: found[name] for name in wanted}, f"the saved model, loaded by {who}"
        )


def _decoder(model: Any) -> Decoder:
    """The shape for the embedded engine. A family that only other engines run says so, and is left
    to the tests of those."""
    try:
        shape: Decoder = model.decoder()
    except ConfigError as error:
        expect("engine" in str(error), f"decoder() raised {error}, which names no engine")
        inapplicable(str(error))
    return shape


def _ids(case: Case, model: Any) -> int:
    return min(int(model.decoder().vocab_size), 256)


def _tensors(shape: Decoder) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Canonical names and shapes of what a decoder is made of."""
    width, heads = shape.hidden_size, shape.heads * shape.head_dim
    kv, inner = shape.kv_heads * shape.head_dim, shape.intermediate_size
    yield "model.embed_tokens.weight", (shape.vocab_size, width)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (width,)
        yield f"{at}.post_attention_layernorm.weight", (width,)
        for name, rows in (("q", heads), ("k", kv), ("v", kv)):
            yield f"{at}.self_attn.{name}_proj.weight", (rows, width)
            if shape.attention_bias:
                yield f"{at}.self_attn.{name}_proj.bias", (rows,)
        yield f"{at}.self_attn.o_proj.weight", (width, heads)
        if shape.qk_norm:
            yield f"{at}.self_attn.q_norm.weight", (shape.head_dim,)
            yield f"{at}.self_attn.k_norm.weight", (shape.head_dim,)
        yield f"{at}.mlp.gate_proj.weight", (inner, width)
        yield f"{at}.mlp.up_proj.weight", (inner, width)
        yield f"{at}.mlp.down_proj.weight", (width, inner)
    yield "model.norm.weight", (width,)
    if not shape.tied:
        yield "lm_head.weight", (shape.vocab_size, width)
