"""Kimi K2 checkpoints that `renderers` does not have: published as templates, so through the
template.

K2 Instruct, K2.5 and K2.6 are among `families`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from miles import Array, Message
from miles_plugins.tito.families import KIMI
from miles_plugins.tito.templated import Templated

__all__ = ["KimiK2Early", "KimiK2Thinking"]

_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|im_assistant|>assistant<|im_middle|>' }}THOUGHT{{ m.content or '' }}"
    "{% if m.tool_calls %}{{ '<|tool_calls_section_begin|>' }}{% for c in m.tool_calls %}"
    "{{ '<|tool_call_begin|>functions.' + c.function.name + ':' + loop.index0|string }}"
    "{{ '<|tool_call_argument_begin|>' }}{{ c.function.arguments | tojson }}"
    "{{ '<|tool_call_end|>' }}{% endfor %}{{ '<|tool_calls_section_end|>' }}{% endif %}"
    "{% elif m.role == 'user' %}{{ '<|im_user|>user<|im_middle|>' + m.content }}"
    "{% else %}{{ '<|im_system|>' + m.role + '<|im_middle|>' + m.content }}{% endif %}"
    "{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
)
"""The shape of the family's markup, for the contract suite."""
_UNTHOUGHT = "<think></think>"
_THINKS = "{{ '<think>' + (m.reasoning_content or '') + '</think>' }}"


class KimiK2Early(Templated):
    """Kimi K2 by the template it was first published with: a token a role, no reasoning, calls
    numbered in each turn. Ids of calls are those that the model writes."""

    name = "kimi_k2_early"
    tokens = KIMI
    end = "<|im_end|>"
    calls = ("<|tool_calls_section_begin|>",)
    appendable = ("user", "tool", "system")
    example: ClassVar[tuple[str, Sequence[str]]] = (_TEMPLATE.replace("THOUGHT", ""), ())


class KimiK2Thinking(KimiK2Early):
    """Kimi K2 Thinking by the checkpoint's own template: as K2, every turn with its thought, which
    is empty where there is none. A call may end a thought. Old reasoning, which the template drops
    up to the first answer without calls, is kept."""

    name = "kimi_k2_thinking"
    example = (_TEMPLATE.replace("THOUGHT", _THINKS), ("<think>", "</think>"))
    grows_lists = True

    def demonstrate(self, said: str | Message) -> Array:
        """(tokens,) int32 as the template writes them while they are new: with the thought, which
        it drops from the first answer at once, or an empty one."""
        message = {"role": "assistant", "content": said} if isinstance(said, str) else dict(said)
        thought = message.pop("reasoning_content", None) or ""
        text = self._vocabulary.decode(self._sampled(message))
        if text.startswith(_UNTHOUGHT):
            text = f"<think>{thought}</think>{text[len(_UNTHOUGHT) :]}"
        return self.encode(text + self._closing)
