"""A family that is published as chat templates, of which the checkpoint's own is used.

What a family is, its class says as data; the template is `generic`'s business. Families whose
markup the library `renderers` has are in `families`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from miles import Array, ConfigError, Context, EpisodeError, Message, Tool
from miles_plugins.tito.generic import Generic
from miles_plugins.tito.surrogate import byte_surrogate

__all__ = ["Templated"]


class Templated(Generic):
    """A template that is held against its family: tokens, how a turn ends, the markup of calls."""

    tokens: ClassVar[tuple[str, ...]]
    """Special tokens that the tokenizer must have."""
    end: ClassVar[str]
    """The one that ends a turn, and the only one."""
    calls: ClassVar[tuple[str, ...]]
    """Texts of which a template that writes this family's tool calls has one."""
    open_arguments: ClassVar[tuple[str, ...]] = ()
    """Template arguments that a run may choose; every other is fixed."""
    appendable: ClassVar[tuple[str, ...]] = ("user", "tool")
    """Roles that may follow an assistant's turn."""
    example: ClassVar[tuple[str, Sequence[str]]]
    """For the contract suite: a template of the family's shape, and tokens that it writes beside
    `tokens`."""

    @classmethod
    def example_config(cls, directory: Path) -> Mapping[str, Any]:
        """For the contract suite: a tokenizer of bytes with the family's tokens."""
        template, more = cls.example
        byte_surrogate(directory, (*cls.tokens, *more), template)
        return {"path": str(directory)}

    @classmethod
    def warnings(cls, config: Generic.Config, planned: Any) -> list[str]:
        """None: the template is the family's."""
        return []

    def __init__(self, config: Generic.Config, context: Context) -> None:
        other = sorted(set(config.arguments) - set(self.open_arguments))
        if other or config.stop or config.template:
            what = f"arguments {', '.join(other)}" if other else "stop or template"
            raise ConfigError(
                f"tito {self.name}: {what} are fixed by the family; open is "
                f"{', '.join(self.open_arguments) or 'nothing'}"
            )
        super().__init__(config, context)
        where = f"tito {self.name} does not fit the checkpoint {self._directory}"
        missing = [t for t in self.tokens if self._tokenizer.token_to_id(t) is None]
        if missing:
            raise ConfigError(f"{where}: it has no special token {', '.join(missing)}")
        end = self._tokenizer.token_to_id(self.end)
        if self.stop_ids != (end,):
            raise ConfigError(
                f"{where}: it ends a turn with ids {list(self.stop_ids)}, the family with "
                f"{self.end} (id {end})"
            )
        signs = self._markup.calls.signs if self._markup.calls else ()
        if not any(sign in each for each in signs for sign in self.calls):
            raise ConfigError(
                f"{where}: its chat template writes no tool calls of this family; tito=generic "
                "uses any template"
            )

    def extend(
        self,
        stored: Array,
        history: Sequence[Message],
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
    ) -> Array:
        """As `generic`; raises `EpisodeError` for a role that may not follow a turn."""
        for index, message in enumerate(messages):
            if message.get("role") not in self.appendable:
                raise EpisodeError(
                    f"tito {self.name}: message {index} has role {message.get('role')!r}; after "
                    f"an assistant's turn may follow: {', '.join(self.appendable)}"
                )
        return super().extend(stored, history, messages, tools=tools)
