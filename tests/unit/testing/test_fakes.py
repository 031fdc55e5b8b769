"""The fakes keep their protocols, follow their scripts, and learn together."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from miles import (
    Batch,
    EngineError,
    Request,
    Sampling,
    Span,
    Term,
    TrainerError,
    WeightSyncError,
    WorkerError,
    flatten,
)
from miles.registry.conformance import component_faults
from miles.testing import (
    FakeEngine,
    FakeEnvironment,
    FakeHandle,
    FakeTito,
    FakeTrainer,
    context,
    make_group,
    make_sample,
)


def _request(name: str = "r", *, tokens: str = "ab", size: int = 6, **how) -> Request:
    sampling = Sampling(max_new_tokens=size, **how)
    return Request(id=name, key=name, tokens=FakeTito().encode(tokens), sampling=sampling, seed=3)


@pytest.mark.parametrize(
    ("kind", "made"),
    [
        ("engine", FakeEngine()),
        ("trainer", FakeTrainer()),
        ("tito", FakeTito()),
        ("environment", FakeEnvironment()),
    ],
)
def test_fakes_conform_to_their_protocols(kind, made) -> None:
    assert component_faults(kind, made) == []


# ---------------------------------------------------------------- FakeEngine


def test_fake_engine_recites_texts_in_turn_and_stops() -> None:
    engine = FakeEngine(FakeEngine.Config(texts=("yes", "no")))
    stop = FakeTito.stop_ids[0]

    async def ask():
        return [await engine.generate(_request(stop_ids=(stop,))) for _ in range(3)]

    said = [FakeTito().decode(c.tokens) for c in asyncio.run(ask())]
    assert said == ["yes<end>", "no<end>", "yes<end>"]
    assert [r.id for r in engine.requests] == ["r", "r", "r"]


def test_fake_engine_follows_a_script_that_may_raise() -> None:
    def script(request: Request) -> str:
        if request.id == "bad":
            raise EngineError("scripted")
        return request.id

    engine = FakeEngine(script=script)
    assert FakeTito().decode(asyncio.run(engine.generate(_request("hi"))).tokens) == "hi"
    with pytest.raises(EngineError, match="scripted"):
        asyncio.run(engine.generate(_request("bad")))


def test_fake_engine_fails_every_nth_request() -> None:
    engine = FakeEngine(FakeEngine.Config(fail_every=2))

    async def ask():
        return await asyncio.gather(
            *(engine.generate(_request(f"r{i}")) for i in range(4)), return_exceptions=True
        )

    failed = [isinstance(answer, EngineError) for answer in asyncio.run(ask())]
    assert failed == [False, True, False, True]


def test_fake_engine_scripted_logprobs_are_the_policys_own() -> None:
    engine = FakeEngine(FakeEngine.Config(texts=("xyz",)))

    async def ask():
        completion = await engine.generate(_request())
        whole = np.concatenate([_request().tokens, completion.tokens])
        return completion, await engine.score(whole)

    completion, scored = asyncio.run(ask())
    np.testing.assert_allclose(completion.logprobs, scored[2:], rtol=1e-6)


def test_fake_engine_spans_tell_a_load_in_the_middle() -> None:
    engine = FakeEngine(FakeEngine.Config(delay_s=0.001))

    async def ask():
        task = asyncio.ensure_future(engine.generate(_request(size=40)))
        while (await engine.health())["active"] == 0 or not engine._active[0].tokens:
            await asyncio.sleep(0.001)
        await engine.load(5, FakeEngine.example_weights(5).items())
        return await task

    spans = asyncio.run(ask()).spans
    assert [s.version for s in spans] == [0, 5]
    assert (spans[0].start, spans[0].stop, spans[1].stop) == (0, spans[1].start, 40)


def test_fake_engine_abort_ends_a_paused_request() -> None:
    engine = FakeEngine()

    async def ask():
        await engine.pause()
        task = asyncio.ensure_future(engine.generate(_request()))
        await asyncio.sleep(0)
        assert await engine.abort() == 1
        return await task

    assert asyncio.run(ask()).finish == "abort"


def test_fake_engine_refuses_other_weights() -> None:
    with pytest.raises(WeightSyncError, match=r"expected 'bigram.weight' alone, got other"):
        asyncio.run(FakeEngine().load(1, [("other", np.zeros(3))]))


# ---------------------------------------------------------------- FakeTrainer


def _batch(group, advantage: float = 1.0) -> Batch:
    tokens = flatten(group.samples)
    weights = (tokens.trainable / tokens.trainable.sum()).astype(np.float32)
    inputs = {"advantage": np.full(len(weights), advantage, np.float32)}
    return Batch(
        tokens=tokens, terms=(Term(name="p", function="x:y", weights=weights, inputs=inputs),)
    )


def test_fake_trainer_gradient_is_that_of_finite_differences() -> None:
    trainer = FakeTrainer(FakeTrainer.Config(lr=1.0))
    batch = _batch(make_group(rewards=(1.0, 0.0)))
    before = trainer._weight_VV.astype(np.float64)
    trainer.step(batch)
    slope_VV = trainer._weight_VV.astype(np.float64) - before
    tokens, start = batch.tokens, int(batch.tokens.lengths[0]) - 2
    row, column = tokens.tokens[start], tokens.tokens[start + 1]

    def loss(shift: float) -> float:
        moved = FakeTrainer()
        moved._weight_VV = before.copy()
        moved._weight_VV[row, column] += shift
        return float((moved.logprobs(tokens, "current") * batch.terms[0].weights).sum())

    numeric = (loss(1e-2) - loss(-1e-2)) / 2e-2
    assert slope_VV[row, column] == pytest.approx(numeric, rel=2e-3)


def test_fake_trainer_refuses_what_is_not_finite_and_keeps_its_weights() -> None:
    trainer = FakeTrainer()
    before = trainer._weight_VV.copy()
    with pytest.raises(TrainerError, match="not finite"):
        trainer.step(_batch(make_group(), advantage=np.nan))
    assert trainer.version == 0
    assert np.array_equal(before, trainer._weight_VV)


def test_fake_trainer_fails_by_script() -> None:
    trainer = FakeTrainer(FakeTrainer.Config(fail_at=(1,)))
    trainer.step(_batch(make_group()))
    with pytest.raises(TrainerError, match="on purpose at version 1"):
        trainer.step(_batch(make_group()))


def test_fake_trainer_save_load_round_trip(tmp_path) -> None:
    one, two = FakeTrainer(), FakeTrainer()
    one.step(_batch(make_group()))
    one.save(tmp_path)
    two.load(tmp_path)
    assert two.version == 1
    assert np.array_equal(dict(one.export())["bigram.weight"], dict(two.export())["bigram.weight"])


def test_fakes_learn_the_fake_task_together() -> None:
    """REINFORCE by hand: sample, reward, step, load; the reward must rise far."""
    environment, tito = FakeEnvironment(), FakeTito()
    engine, trainer = FakeEngine(), FakeTrainer(FakeTrainer.Config(lr=60.0))
    task = environment.tasks("train")[0]

    async def attempt(seed: int):
        from miles.loop import episode
        from miles.session import SessionConversation

        conversation = SessionConversation(
            key=f"k{seed}",
            tito=tito,
            engine=engine,
            sampling=Sampling(max_new_tokens=8),
            seed=seed,
        )
        return await episode(environment.episode(task, seed), conversation, 4)

    async def learn():
        means = []
        for step in range(30):
            tries = await asyncio.gather(*(attempt(100 * step + i) for i in range(32)))
            rewards = np.array([t.reward for t in tries])
            means.append(rewards.mean())
            tokens = flatten([s for t in tries for s in t.samples])
            good = (rewards - rewards.mean()) / (rewards.std() + 1e-3)
            each = np.repeat(good, tokens.lengths).astype(np.float32)
            weights = (tokens.trainable / tokens.trainable.sum()).astype(np.float32)
            term = Term(name="p", function="x:y", weights=weights, inputs={"advantage": each})
            update = trainer.step(Batch(tokens=tokens, terms=(term,)))
            await engine.load(update.version, trainer.export())
        return means

    means = asyncio.run(learn())
    assert means[0] < 0.1
    assert means[-1] > 0.5


# ---------------------------------------------------------------- FakeHandle and builders


class _Part:
    def answer(self, value):
        return value

    async def later(self, *, value):
        return value

    def fail(self):
        raise ZeroDivisionError("by nothing")


def test_fake_handle_calls_every_rank() -> None:
    handle = FakeHandle("h", {"part": _Part()}, {"part": _Part()})
    assert handle.world == 2
    assert asyncio.run(handle.call_all("part.answer", {"x": 1})) == [{"x": 1}, {"x": 1}]
    assert asyncio.run(handle.call("part.later", value=2, rank=1)) == 2
    assert handle.calls == ["part.answer", "part.answer", "part.later"]


def test_fake_handle_takes_the_wire() -> None:
    sample = make_sample()
    handle = FakeHandle("h", {"part": _Part()})
    back = asyncio.run(handle.call("part.answer", sample))
    assert back is not sample
    assert np.array_equal(back.tokens, sample.tokens)
    with pytest.raises(TypeError, match="cannot cross a process"):
        asyncio.run(handle.call("part.answer", object()))


def test_fake_handle_raises_as_a_worker_does() -> None:
    handle = FakeHandle("h", {"part": _Part()})
    with pytest.raises(WorkerError, match="ZeroDivisionError: by nothing"):
        asyncio.run(handle.call("part.fail"))
    with pytest.raises(WorkerError, match=r"no part 'nobody' \(has: part\)"):
        asyncio.run(handle.call("nobody.home"))
    handle.dead = True
    with pytest.raises(WorkerError, match="is dead"):
        asyncio.run(handle.call("part.answer", 1))


def test_make_sample_spreads_versions_over_the_completion() -> None:
    sample = make_sample(2, 5, versions=(1, 3))
    assert sample.spans == (
        Span(start=2, stop=sample.spans[0].stop, version=1),
        Span(start=sample.spans[0].stop, stop=7, version=3),
    )
    assert sample.oldest == 1
    with pytest.raises(ValueError, match="3 versions for 2 sampled tokens"):
        make_sample(2, 2, versions=(0, 1, 2))


def test_make_group_gives_a_trajectory_for_every_reward() -> None:
    group = make_group(4, rewards=(1, 0, 0.5), lengths=(1, 2, 3), versions=(2,))
    assert [t.reward for t in group.trajectories] == [1.0, 0.0, 0.5]
    assert [int(s.sampled.sum()) for s in group.samples] == [1, 2, 3]
    assert group.oldest == 2


def test_context_makes_its_directory(tmp_path) -> None:
    made = context(tmp_path / "new", seed=4)
    assert made.directory.is_dir()
    assert made.seed == 4
