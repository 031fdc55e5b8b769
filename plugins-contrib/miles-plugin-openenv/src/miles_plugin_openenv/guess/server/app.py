"""The game behind OpenEnv's server: `app` is what serves it."""

import random
import re
from typing import Any
from uuid import uuid4

from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import State

from miles_plugin_openenv.guess.models import Guess, Hint

TRIES = 4


class GuessEnvironment(Environment):
    """A number from 1 to 9 and four tries; each try that is left over is worth a tenth."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._secret, self._state = 0, State(episode_id=str(uuid4()), step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Hint:
        """Draw the number from the seed."""
        self._secret = random.Random(seed).randint(1, 9)
        self._state = State(episode_id=episode_id or str(uuid4()), step_count=0)
        return Hint(text=f"I think of a number from 1 to 9. You have {TRIES} tries.")

    def step(self, action: Guess, timeout_s: float | None = None, **more: Any) -> Hint:
        """Compare the last number of the text with the secret."""
        self._state.step_count += 1
        left = TRIES - self._state.step_count
        numbers = re.findall(r"\d+", action.message)
        guess = int(numbers[-1][:9]) if numbers else None
        if guess == self._secret:
            return Hint(text="Found.", done=True, reward=0.7 + 0.1 * left)
        if left == 0:
            return Hint(text=f"It was {self._secret}.", done=True, reward=0.0)
        if guess is None:
            return Hint(text="That is no number.", reward=0.0)
        word = "higher" if guess < self._secret else "lower"
        return Hint(text=f"It is {word} than {guess}.", reward=0.0)

    @property
    def state(self) -> State:
        """How many tries were made."""
        return self._state


app = create_fastapi_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=256)
