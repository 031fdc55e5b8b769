"""What a guesser says and hears."""

from openenv.core.env_server.types import Action, Observation
from pydantic import Field


class Guess(Action):
    """A guess, with any words around it."""

    message: str = Field(description="Text with a whole number in it")


class Hint(Observation):
    """What became of it."""

    text: str = Field(default="", description="What the guesser is told")
