"""Components that each break one promise, by the name of the check that must notice; and good ones.

A local plugin file. Names are `<check>` or `<check>_<which>`; `good` keeps every promise.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from miles import Budget, Drop, Group, LossScaling, Task, TokenMismatch
from miles.testing import FakeEngine, FakeEnvironment, FakeTito
from miles_plugins.algorithm.grpo import Grpo
from miles_plugins.evaluator.shared import Shared
from miles_plugins.model.qwen3 import Qwen3
from miles_plugins.precision.fp32 import Fp32
from miles_plugins.runtime.local import Local
from miles_plugins.selector.shuffle import Shuffle
from miles_plugins.tracker.jsonl import Jsonl
from miles_plugins.trainer.fsdp import Fsdp
from miles_plugins.transport.memory import Memory

miles_components: dict[str, dict[str, type]] = {
    "environment": {"good": FakeEnvironment},
    "engine": {"good": FakeEngine},
    "tito": {"good": FakeTito},
}


def breaks(kind: str, name: str) -> Callable[[type], type]:
    """Register a class that breaks the promise of that name."""

    def register(cls: type) -> type:
        miles_components.setdefault(kind, {})[name] = cls
        return cls

    return register


# ---------------------------------------------------------------- every kind


@breaks("selector", "docstring")
class Silent(Shuffle):
    pass


@breaks("selector", "config_documented")
class Undocumented(Shuffle):
    """A selector with a key that nothing explains."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(Shuffle.Config):
        """One key more."""

        mystery: int = 0


@breaks("selector", "config_frozen")
class Positional(Shuffle):
    """A selector whose config takes values by position."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """Like the other."""

        epochs: int = 0
        """Epochs."""
        admit: tuple[str, ...] = ()
        """Filters."""


# ---------------------------------------------------------------- environment


@breaks("environment", "tasks")
class SameIds(FakeEnvironment):
    """All tasks have one id."""

    def _task(self, split, index):
        return replace(super()._task(split, index), id="same")


@breaks("environment", "tasks_plain")
class LiveData(FakeEnvironment):
    """Tasks carry a set."""

    def _task(self, split, index):
        return replace(super()._task(split, index), data={"index": index, "set": {1}})


@breaks("environment", "tasks_repeat")
class Restless(FakeEnvironment):
    """Tasks are new each time."""

    def _task(self, split, index):
        return replace(super()._task(split, index), prompt=f"{random.random()}a")


@breaks("environment", "splits_disjoint")
class Leaky(FakeEnvironment):
    """Held-out tasks are training tasks."""

    def _task(self, split, index):
        return super()._task("train", index)


class _Unreal:
    def __init__(self, made):
        self._made = made

    async def reset(self):
        return await self._made.reset()

    async def step(self, reply):
        return await self._made.step(reply)

    async def reward(self):
        return math.nan


@breaks("environment", "episode_rewards")
class NoNumber(FakeEnvironment):
    """Rewards are NaN."""

    def episode(self, task, seed):
        return _Unreal(super().episode(task, seed))


@breaks("environment", "episode_repeats")
class Dicing(FakeEnvironment):
    """Prompts ignore the seed."""

    def episode(self, task, seed):
        return super().episode(replace(task, prompt=f"{random.random()}a"), seed)


@breaks("environment", "episodes_apart")
class Sharing(FakeEnvironment):
    """All episodes of a task write into one list."""

    def episode(self, task, seed):
        made = super().episode(task, seed)
        self._lists = getattr(self, "_lists", {})
        made._said = self._lists.setdefault(task.id, [])
        return made


class _Worthless(_Unreal):
    async def reward(self):
        return 0.0


@breaks("environment", "solution_is_worth_it")
class Unteachable(FakeEnvironment):
    """Nothing is ever worth anything."""

    def episode(self, task, seed):
        return _Worthless(super().episode(task, seed))


class _Deeper:
    """Tasks of the fake environment, without its episodes."""

    Config = FakeEnvironment.Config

    def __init__(self, config, context):
        self._tasks = FakeEnvironment(config, context).tasks

    def tasks(self, split):
        return self._tasks(split)


class _AtPlay(_Deeper):
    """Takes over one attempt."""

    async def play(self, task, seed, tools):
        conversation = tools.conversation(tools.id)
        await conversation.turn(task.prompt)
        return conversation.trajectory(reward=1.0)


miles_components["environment"]["good_play"] = _AtPlay


@breaks("environment", "play")
class Renaming(_AtPlay):
    """Gives the trajectory an id of its own."""

    async def play(self, task, seed, tools):
        return replace(await super().play(task, seed, tools), id="mine")


class _AtRollout(_Deeper):
    """Takes over a whole group."""

    async def rollout(self, task, tools):
        made = []
        for index in range(tools.samples):
            conversation = tools.conversation(f"{tools.id}.{index}")
            await conversation.turn(task.prompt)
            made.append(conversation.trajectory(reward=float(index)))
        return Group(id=tools.group, task=task, trajectories=tuple(made))


miles_components["environment"]["good_rollout"] = _AtRollout


@breaks("environment", "rollout")
class Lazy(_AtRollout):
    """Gives one trajectory too few."""

    async def rollout(self, task, tools):
        return await super().rollout(task, replace(tools, samples=tools.samples - 1))


# ---------------------------------------------------------------- selector


@breaks("selector", "next")
class Inventing(Shuffle):
    """Hands out tasks of its own."""

    def next(self):
        return Task(id="mine", prompt="x")


@breaks("selector", "seeded")
class Unseeded(Shuffle):
    """Draws from nowhere."""

    def next(self):
        for _ in range(random.randrange(8)):
            super().next()
        return super().next()


@breaks("selector", "state_continues")
class Amnesic(Shuffle):
    """Forgets its state."""

    def load_state_dict(self, state):
        pass


@breaks("selector", "state_apart")
class Alive(Shuffle):
    """Gives its own state away."""

    def __init__(self, config, context):
        super().__init__(config, context)
        self._live = {}

    def next(self):
        task = super().next()
        self._live.update(super().state_dict())
        return task

    def state_dict(self):
        self._live.update(super().state_dict())
        return self._live


@breaks("selector", "admit")
class Wordy(Shuffle):
    """Drops with a sentence for a reason."""

    def admit(self, group):
        return Drop(reason="I do not like it")


# ---------------------------------------------------------------- tito


@breaks("tito", "ids")
class Wide(FakeTito):
    """Ids are int64."""

    def encode(self, text):
        return super().encode(text).astype(np.int64)


@breaks("tito", "encode_decode")
class Lossy(FakeTito):
    """Drops white space."""

    def encode(self, text):
        return super().encode(text.strip())


@breaks("tito", "special_text_is_text")
class Gullible(FakeTito):
    """Believes markup in text."""

    def encode(self, text):
        parts = text.split("<end>")
        pieces = [super().encode(parts[0])]
        for part in parts[1:]:
            pieces += [np.array([257], np.int32), super().encode(part)]
        return np.concatenate(pieces)


@breaks("tito", "demonstrate")
class Endless(FakeTito):
    """Never stops."""

    def demonstrate(self, text):
        return super().demonstrate(text)[:-1]


@breaks("tito", "parse")
class Deaf(FakeTito):
    """Hears the end mark as text."""

    def parse(self, tokens, *, tools=()):
        return {"role": "assistant", "content": self.decode(tokens)}


@breaks("tito", "render")
class Closed(FakeTito):
    """Opens no turn."""

    def render(self, messages, *, tools=()):
        return np.append(super().render(messages), 257).astype(np.int32)


@breaks("tito", "extend_appends")
class Doubling(FakeTito):
    """Ends a turn that has ended."""

    def extend(self, stored, history, messages, *, tools=()):
        return np.concatenate([[257], super().extend(stored, history, messages)]).astype(np.int32)


@breaks("tito", "extend_chains")
class Growing(FakeTito):
    """Says something else each time."""

    count = itertools.count()

    def extend(self, stored, history, messages, *, tools=()):
        said = self.encode(str(next(self.count)))
        return np.concatenate([super().extend(stored, history, messages), said])


@breaks("tito", "extend_closes_cut_turns")
class Open(FakeTito):
    """Leaves a turn open that was cut."""

    def extend(self, stored, history, messages, *, tools=()):
        return self.render(messages)


@breaks("tito", "extend_chains_refusing")
class Refusing(FakeTito):
    """Sees a mismatch in every second turn."""

    def extend(self, stored, history, messages, *, tools=()):
        if len(history) > 2:
            raise TokenMismatch("token 3 differs")
        return super().extend(stored, history, messages)


# ---------------------------------------------------------------- model and precision


@breaks("model", "matches")
class Greedy(Qwen3):
    """Claims every family."""

    @classmethod
    def matches(cls, config):
        return True


@breaks("model", "hf_config")
class Live(Qwen3):
    """Gives its own config away."""

    def hf_config(self):
        self._shared = getattr(self, "_shared", None) or super().hf_config()
        return self._shared


@breaks("model", "module")
class Misshapen(Qwen3):
    """Means another width of the MLP."""

    def decoder(self):
        return replace(super().decoder(), intermediate_size=8)


@breaks("model", "engine_agrees")
class Swapped(Qwen3):
    """Takes the gate for the other half."""

    def engine_name(self, name):
        swap = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
        for one, other in swap.items():
            if one in name:
                return super().engine_name(name.replace(one, other))
        return super().engine_name(name)


@breaks("model", "tito")
class Mute(Qwen3):
    """Names a handler that nobody has."""

    tito = "no-such-handler"


@breaks("precision", "stages")
class Invented(Fp32):
    """Computes in a type that torch has not."""

    compute = "float31"


@breaks("precision", "budget")
class Negative(Fp32):
    """Allows less than nothing."""

    def __init__(self, config, context):
        self.budget = Budget(max=-1.0, mean=1e-6)


@breaks("precision", "scaling")
class Rounded(Fp32):
    """Scales its loss by what rounds it."""

    scaling = LossScaling(initial=1000.0, growth=2.0, backoff=0.5, interval=1)


@breaks("precision", "fingerprint")
class Hashed(Fp32):
    """Prints a hash that differs from process to process."""

    def fingerprint(self):
        return str(hash("float32"))


# ---------------------------------------------------------------- trainer


@breaks("trainer", "versions_count")
class Uncounted(Fsdp):
    """Says version 7 after every step."""

    def step(self, batch):
        return replace(super().step(batch), version=7)


@breaks("trainer", "step_lowers_loss")
class Idle(Fsdp):
    """Trains on nothing."""

    def step(self, batch):
        terms = tuple(replace(t, weights=0 * t.weights) for t in batch.terms)
        update = super().step(replace(batch, terms=terms))
        metrics = {**update.metrics, **{f"loss/{t.name}": 1.0 for t in terms}}
        return replace(update, metrics=metrics)


@breaks("trainer", "logprobs")
class Shifted(Fsdp):
    """Log-probs stand one token too late."""

    def logprobs(self, tokens, source):
        return np.roll(super().logprobs(tokens, source), 1)


@breaks("trainer", "export")
class Stingy(Fsdp):
    """Keeps the last tensor."""

    def export(self):
        yield from list(super().export())[:-1]


@breaks("trainer", "save_load")
class Forgetful(Fsdp):
    """Loads no optimizer."""

    def load(self, directory, *, weights_only=False):
        super().load(directory, weights_only=True)


@breaks("trainer", "refuses_what_is_not_finite")
class Credulous(Fsdp):
    """Takes NaN for zero."""

    def step(self, batch):
        terms = tuple(replace(t, weights=np.nan_to_num(t.weights, posinf=0.0)) for t in batch.terms)
        return super().step(replace(batch, terms=terms))


# ---------------------------------------------------------------- engine


@breaks("engine", "seed_decides")
class Random(FakeEngine):
    """Draws anew each time."""

    async def generate(self, request):
        return await super().generate(replace(request, seed=random.randrange(2**60)))


@breaks("engine", "cancel")
class Oblivious(FakeEngine):
    """Goes on for callers that have gone."""

    async def generate(self, request):
        return await asyncio.shield(asyncio.ensure_future(super().generate(request)))


@breaks("engine", "stream")
class Dribbling(FakeEngine):
    """Streams everything but the last token."""

    async def stream(self, request):
        made = await self.generate(request)
        for token in made.tokens[:-1]:
            yield np.array([token], np.int32)
        yield made


@breaks("engine", "company_is_nothing")
class Sociable(FakeEngine):
    """Draws by how many others there are."""

    async def generate(self, request):
        return await super().generate(replace(request, seed=request.seed + len(self._active)))


@breaks("engine", "completion")
class Overlong(FakeEngine):
    """Spans leave the completion."""

    async def generate(self, request):
        made = await super().generate(request)
        return replace(made, spans=(replace(made.spans[0], stop=len(made.tokens) + 1),))


@breaks("engine", "logprobs_are_its_score")
class Boastful(FakeEngine):
    """Tells better log-probs than it scores."""

    async def generate(self, request):
        made = await super().generate(request)
        return replace(made, logprobs=made.logprobs / 2)


@breaks("engine", "finish")
class Unstoppable(FakeEngine):
    """Ignores stop ids."""

    async def generate(self, request):
        sampling = replace(request.sampling, stop_ids=())
        return await super().generate(replace(request, sampling=sampling))


@breaks("engine", "truncation")
class Confused(FakeEngine):
    """Tells the cut distribution for the full one."""

    async def generate(self, request):
        made = await super().generate(request)
        if made.truncated_logprobs is None:
            return made
        return replace(made, logprobs=made.truncated_logprobs)


@breaks("engine", "temperature")
class Cold(FakeEngine):
    """Samples everything at one temperature."""

    async def generate(self, request):
        sampling = request.sampling
        if sampling.temperature and sampling.top_k == 1:
            sampling = replace(sampling, temperature=1 / sampling.temperature)
        return await super().generate(replace(request, sampling=sampling))


@breaks("engine", "abort")
class Stubborn(FakeEngine):
    """Aborts nothing."""

    async def abort(self, keys=None):
        return 1 if keys else 0


@breaks("engine", "pause")
class Sleepless(FakeEngine):
    """Does not pause."""

    async def pause(self):
        pass


@breaks("engine", "load_refuses")
class HalfLoaded(FakeEngine):
    """Counts a refused load."""

    async def load(self, version, weights):
        self._version, before = version, self._version
        if before < 0:
            self._version = before
        await super().load(version, weights)


@breaks("engine", "load_changes_the_policy")
class Stale(FakeEngine):
    """Serves the first weights for ever."""

    async def load(self, version, weights):
        kept = self._weight_VV
        await super().load(version, weights)
        if version:
            self._weight_VV = kept


@breaks("engine", "refuses_prompts")
class Swallowing(FakeEngine):
    """Cuts prompts that do not fit."""

    async def generate(self, request):
        kept = request.tokens[-self.config.max_len // 2 :]
        return await super().generate(replace(request, tokens=kept))


# ---------------------------------------------------------------- transport, algorithm


@breaks("transport", "publish")
class Unsigned(Memory):
    """Gives a receipt without a digest."""

    async def publish(self, version, *, trainer, engines):
        receipt = await super().publish(version, trainer=trainer, engines=engines)
        return replace(receipt, digest="")


@breaks("transport", "refused")
class Smooth(Memory):
    """Says that all went well."""

    async def publish(self, version, *, trainer, engines):
        from miles import Receipt, WeightSyncError

        try:
            return await super().publish(version, trainer=trainer, engines=engines)
        except WeightSyncError:
            return Receipt(version=version, digest="ab", bytes=1, seconds=1.0)


class _Changed(Grpo):
    """Grpo with a batch that was changed."""

    def change(self, batch, groups):
        return batch

    def prepare(self, groups, passes):
        return self.change(super().prepare(groups, passes), groups)


def _weights(batch, make):
    terms = tuple(replace(t, weights=make(t.weights)) for t in batch.terms)
    return replace(batch, terms=terms)


@breaks("algorithm", "trainable_only")
class Everywhere(_Changed):
    """Trains on prompts."""

    def change(self, batch, groups):
        return _weights(batch, lambda w: w + np.float32(0.1))


@breaks("algorithm", "batch")
class Infinite(_Changed):
    """Divides by nothing."""

    def change(self, batch, groups):
        return _weights(batch, lambda w: np.where(w > 0, w, np.inf).astype(np.float32))


@breaks("algorithm", "order_of_groups")
class Ordered(_Changed):
    """Believes in the first group."""

    def change(self, batch, groups):
        return _weights(batch, lambda w: w * np.linspace(1, 2, len(w), dtype=np.float32))


@breaks("algorithm", "pure")
class Tired(_Changed):
    """Learns less each time."""

    def change(self, batch, groups):
        self._times = getattr(self, "_times", 0) + 1
        return _weights(batch, lambda w: w / np.float32(self._times))


def looks_across(logprobs, entropy, inputs, options):
    """A term that mixes tokens."""
    return logprobs - logprobs.mean()


@breaks("algorithm", "functions")
class Across(Grpo):
    """Has a term that looks at other tokens."""

    def terms(self):
        return dict.fromkeys(super().terms(), f"{__name__}:looks_across")

    def prepare(self, groups, passes):
        batch = super().prepare(groups, passes)
        functions = self.terms()
        terms = tuple(replace(t, function=functions[t.name]) for t in batch.terms)
        return replace(batch, terms=terms)


# ---------------------------------------------------------------- evaluator, runtime, tracker


@breaks("evaluator", "other_version")
class Careless(Shared):
    """Does not look at versions."""

    async def evaluate(self, version, attempt):
        from miles import Score

        results = await super().evaluate(version, attempt)
        return [Score(set=r.set, version=version, score=0.5, samples=1) for r in results]


@breaks("evaluator", "failures")
class Fragile(Shared):
    """Raises when an attempt does."""

    async def _evaluate(self, plan, version, attempt, deadline):
        for task in self.tasks(plan):
            await attempt(task, samples=1, sampling=plan.sampling, seed=1, of=plan.name)
        return await super()._evaluate(plan, version, attempt, deadline)


@breaks("evaluator", "repeats")
class Fickle(Shared):
    """Plays with other seeds each time."""

    async def _one(self, plan, task, attempt, seed):
        return await super()._one(plan, task, attempt, random.randrange(2**60))


@breaks("runtime", "end")
class Lenient(Local):
    """Only asks a worker to end."""

    async def end(self, handle):
        for process in handle.ranks:
            process.caller.connection.close()


@breaks("runtime", "stop")
class Sticky(Local):
    """Stops only when told twice."""

    told = False

    async def stop(self):
        if self.told:
            await super().stop()
        self.told = True


@breaks("tracker", "takes_odd_values")
class Picky(Jsonl):
    """Takes finite numbers alone."""

    def moment(self, name, data):
        for value in data.values():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{value} is not finite")
        super().moment(name, data)


@breaks("tracker", "closes_twice")
class Once(Jsonl):
    """Closes once."""

    closed = False

    def close(self):
        if self.closed:
            raise RuntimeError("closed")
        self.closed = True
        super().close()


@breaks("tracker", "leaves_data_alone")
class Scribbling(Jsonl):
    """Writes into what it is told."""

    def moment(self, name, data):
        data["seen"] = True
        super().moment(name, data)
