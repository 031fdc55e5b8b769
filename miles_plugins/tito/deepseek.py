"""DeepSeek V3 and its successors up to V3.2: published as templates, so through the template.

V4 has a program in the place of a template and is among `families`.
"""

from __future__ import annotations

from miles_plugins.tito.templated import Templated

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


class DeepSeekV3(Templated):
    """DeepSeek V3, R1, V3.1 and V3.2 by the checkpoint's own template.

    Roles are tokens, calls stand between tokens (V3.2: in DSML). Open argument: `thinking`.
    """

    name = "deepseek_v3"
    tokens = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
    end = tokens[1]
    calls = ("tool▁", "DSML")
    open_arguments = ("thinking",)
    example = (_TEMPLATE, tuple(f"<｜tool▁{part}｜>" for part in _PARTS))
