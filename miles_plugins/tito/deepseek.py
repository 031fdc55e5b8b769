"""DeepSeek V3 and its successors up to V3.2: published as templates, so through the template.

V4 has a program in the place of a template and is among `families`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles import Array, ConfigError, Context, EpisodeError, Message, Tool
from miles_plugins.tito.generic import Generic
from miles_plugins.tito.surrogate import byte_surrogate

__all__ = ["DeepSeekV3"]

_TEMPLATE = (
    "{{ '<｜begin▁of▁sentence｜>' }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content }}{% endif %}"
    "{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% endif %}"
    "{% if m.role == 'assistant' %}"
    "{{ '<｜Assistant｜>' + (m.content or '') }}"
    "{% if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}{% for c in m.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' }}"
    "{{ c.function.arguments | tojson }}{{ '<｜tool▁call▁end｜>' }}{% endfor %}"
    "{{ '<｜tool▁calls▁end｜>' }}{% endif %}{{ '<｜end▁of▁sentence｜>' }}{% endif %}"
    "{% if m.role == 'tool' %}"
    "{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)
"""The shape of the family's markup, for the contract suite."""


class DeepSeekV3(Generic):
    """DeepSeek V3, R1, V3.1 and V3.2 by the checkpoint's own template.

    Roles are tokens, calls stand between tokens (V3.2: in DSML). Open argument: `thinking`.
    """

    name = "deepseek_v3"
    tokens = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
    open_arguments = ("thinking",)
    appendable = ("user", "tool")

    @classmethod
    def example_config(cls, directory: Path) -> Mapping[str, Any]:
        """For the contract suite: a tokenizer of bytes with the family's tokens."""
        inside = (f"<｜tool▁{part}｜>" for part in _PARTS)
        byte_surrogate(directory, (*cls.tokens, *inside), _TEMPLATE)
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
                f"{', '.join(self.open_arguments)}"
            )
        super().__init__(config, context)
        missing = [t for t in self.tokens if self._tokenizer.token_to_id(t) is None]
        if missing:
            raise ConfigError(
                f"tito {self.name} does not fit the tokenizer in {self._directory}: it has no "
                f"special token {', '.join(missing)}"
            )
        end = self._tokenizer.token_to_id(self.tokens[1])
        if self.stop_ids != (end,):
            raise ConfigError(
                f"tito {self.name} does not fit the checkpoint {self._directory}: it ends a turn "
                f"with ids {list(self.stop_ids)}, the family with {self.tokens[1]} (id {end})"
            )
        signs = self._markup.calls.signs if self._markup.calls else ()
        if not any("tool▁" in sign or "DSML" in sign for sign in signs):
            raise ConfigError(
                f"tito {self.name} does not fit the checkpoint {self._directory}: its chat "
                "template writes no tool calls of this family; tito=generic uses any template"
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


_PARTS = (
    "calls▁begin",
    "calls▁end",
    "call▁begin",
    "call▁end",
    "sep",
    "outputs▁begin",
    "outputs▁end",
    "output▁begin",
    "output▁end",
)
