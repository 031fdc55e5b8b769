"""Small simulations for tests: the built-in selector over a modelled environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miles import Context, Settings
from miles.simulate import clock
from miles.simulate.around import Outside
from miles.simulate.distributions import Distribution
from miles.simulate.keys import EngineKeys, EnvironmentKeys, FaultKeys, Keys, TrainerKeys
from miles.simulate.result import Result
from miles.simulate.simulation import Simulation
from miles_plugins.selector.shuffle import Shuffle


def lognormal(mean: float, spread: float = 1.0, **more: float) -> Distribution:
    return Distribution(kind="lognormal", mean=mean, spread=spread, **more)


def keys(*, engine: Any = (), trainer: Any = (), faults: Any = (), **environment: Any) -> Keys:
    """Two engines, attempts of about four turns and a minute."""
    around = {
        "turns": Distribution(kind="geometric", mean=4, low=1),
        "turn_tokens": lognormal(200, low=1),
        "observation_tokens": Distribution(mean=100),
        "delay_s": lognormal(2.0),
        **environment,
    }
    return Keys(
        engine=EngineKeys(**{"gpus": 2, **dict(engine)}),
        trainer=TrainerKeys(**{"step_s": 20.0, "tokens_per_gpu_s": 1e6, **dict(trainer)}),
        environment=EnvironmentKeys(**around),
        faults=FaultKeys(**dict(faults)),
    )


def settings(**changes: Any) -> Settings:
    base = {
        "steps": 6, "groups_per_step": 4, "samples_per_group": 4, "concurrency": 32,
        "max_turns": 50, "max_new_tokens": 4096, "episode_timeout_s": 3600.0,
        "starved_after_s": 100_000.0,
    }  # fmt: skip
    return Settings(**{**base, **changes})


def simulation(
    models: Keys | None = None,
    *,
    admit: tuple[str, ...] = ("none",),
    outside: Outside | None = None,
    first: int | None = None,
    **changes: Any,
) -> Simulation:
    chosen = settings(**changes)
    made = Simulation(
        name="test", settings=chosen, keys=models or keys(), outside=outside, first=first
    )
    context = Context(
        directory=Path("/nonexistent"), seed=chosen.seed, environment=made.environment
    )
    made.selector = Shuffle(Shuffle.Config(admit=admit), context)
    return made


def played(models: Keys | None = None, **changes: Any) -> Result:
    return clock.run(simulation(models, **changes).main(), limit_s=1e7)
