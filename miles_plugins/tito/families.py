"""Model families whose markup is known: one class a family, data only.

The work is in `rendered`; families without a class here use the checkpoint's own template through
`generic`. Light: nothing but names is imported with it.
"""

from __future__ import annotations

from typing import Any

from miles_plugins.tito.rendered import Rendered, Variant

__all__ = [
    "KIMI",
    "DeepSeekV4",
    "Glm4",
    "Glm5",
    "Inkling",
    "KimiK2",
    "KimiK25",
    "MiniMaxM2",
    "Nemotron3",
    "Qwen3",
    "Qwen3VL",
    "Qwen35",
]

_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_THINK = ("<think>", "</think>")
_TOOLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_SHOWN = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")


def _variants(*names: str, **arguments: Any) -> tuple[Variant, ...]:
    return tuple(Variant(renderer=name, arguments=arguments) for name in names)


class Qwen3(Rendered):
    """Qwen3, text: ChatML, `<think>` reasoning, JSON tool calls. Open argument: `enable_thinking`.

    Coder and Instruct-2507 checkpoints have other templates; those that differ in what they write
    are refused here and detected as `generic`.
    """

    name = "qwen3"
    variants = _variants("qwen3")
    tokens = (*_CHATML, *_THINK, *_TOOLS)
    open_arguments = ("enable_thinking",)


class Qwen35(Rendered):
    """Qwen3.5, 3.6 and 3.8: ChatML, reasoning opened by the prompt, XML tool calls; images.

    Which of them a checkpoint is, and whether it thinks unless asked not to, its template tells.
    Open arguments: `enable_thinking`, `preserve_thinking`, `reasoning_effort`.
    """

    name = "qwen3_5"
    variants = (
        Variant(renderer="qwen3.5", arguments={"enable_thinking": True}),
        Variant(renderer="qwen3.5", arguments={"enable_thinking": False}),
        *_variants("qwen3.6", "qwen3.8"),
    )
    tokens = (*_CHATML, *_THINK, *_TOOLS, *_VISION)
    open_arguments = ("enable_thinking", "preserve_thinking", "reasoning_effort")
    image = _SHOWN


class Qwen3VL(Rendered):
    """Qwen3-VL: ChatML, JSON tool calls, images.

    An image in a message is one `<|image_pad|>`, as the template writes it; engine and trainer
    repeat it for the image's patches.
    """

    name = "qwen3_vl"
    variants = _variants("qwen3-vl")
    tokens = (*_CHATML, *_THINK, *_TOOLS, *_VISION)
    image = _SHOWN


_GLM = (
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|endoftext|>",
    *_THINK,
    *_TOOLS,
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)


class Glm4(Rendered):
    """GLM-4.5 and 4.6: roles without an end mark (the next role ends a turn), tool calls in
    `<arg_key>` pairs. Open argument: `enable_thinking`."""

    name = "glm4"
    variants = _variants("glm-4.5")
    tokens = _GLM
    open_arguments = ("enable_thinking",)
    next_role_closes = ("<|user|>", "<|observation|>")


class Glm5(Rendered):
    """GLM-4.7, 5, 5.1 and 5.3: as GLM-4.5 without line breaks, reasoning opened by the prompt.

    Open arguments: `enable_thinking`, `clear_thinking`.
    """

    name = "glm5"
    variants = _variants("glm-5", "glm-5.1", "glm-5.3")
    tokens = _GLM
    open_arguments = ("enable_thinking", "clear_thinking")
    next_role_closes = ("<|user|>", "<|observation|>")


class Nemotron3(Rendered):
    """Nemotron 3 and 3.5: ChatML, reasoning opened by the prompt, XML tool calls.

    Open arguments: `enable_thinking`, `truncate_history_thinking`.
    """

    name = "nemotron3"
    variants = _variants("nemotron-3", "nemotron-3-ultra", "nemotron-3.5")
    tokens = ("<|im_start|>", "<|im_end|>", *_THINK, *_TOOLS)
    open_arguments = ("enable_thinking", "truncate_history_thinking")


KIMI = (
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|im_end|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
"""Special tokens of every Kimi K2."""


class KimiK2(Rendered):
    """Kimi K2: a token a role, tool calls whose ids the model writes itself."""

    name = "kimi_k2"
    variants = _variants("kimi-k2")
    tokens = KIMI
    tools_by_code = True


class KimiK25(Rendered):
    """Kimi K2.5 and K2.6, text: as K2, with reasoning opened by the prompt. Open argument:
    `thinking`."""

    name = "kimi_k2_5"
    variants = _variants("kimi-k2.5")
    tokens = (
        *KIMI,
        *_THINK,
        "<|media_begin|>",
        "<|media_content|>",
        "<|media_pad|>",
        "<|media_end|>",
    )
    open_arguments = ("thinking",)
    tools_by_code = True
    rewritten_by = ("user", "tool")


class MiniMaxM2(Rendered):
    """MiniMax M2, M2.1 and M2.5: reasoning opened by the prompt, XML tool calls.

    Which of them introduces itself how, the checkpoint's template tells.
    """

    name = "minimax_m2"
    variants = (
        Variant(renderer="minimax-m2"),
        Variant(
            renderer="minimax-m2",
            arguments={"model_identity": "You are a helpful assistant."},
        ),
        *(
            Variant(
                renderer="minimax-m2",
                arguments={
                    "model_identity": "You are a helpful assistant. Your name is "
                    f"MiniMax-{version} and is built by MiniMax."
                },
            )
            for version in ("M2", "M2.1", "M2.7")
        ),
    )
    tokens = (
        "]~!b[",
        "]~b]",
        "[e~[",
        *_THINK,
        "<minimax:tool_call>",
        "</minimax:tool_call>",
    )
    appendable = ("user", "tool")


_DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")


class DeepSeekV4(Rendered):
    """DeepSeek V4: roles as tokens, XML tool calls, results sorted by their calls.

    The checkpoint has a program in the place of a template; `renderers` follows it. Open arguments:
    `enable_thinking`, `reasoning_effort`, `drop_thinking`.
    """

    name = "deepseek_v4"
    variants = _variants("deepseek-v4")
    tokens = (
        *_DEEPSEEK,
        *_THINK,
        "｜DSML｜",
        "<｜latest_reminder｜>",
        *(f"<｜{t}｜>" for t in ("action", "query", "authority", "domain", "title", "read_url")),
    )
    open_arguments = ("enable_thinking", "reasoning_effort", "drop_thinking")
    appendable = ("user", "tool")
    results_in_call_order = True
    tools_by_code = True


class Inkling(Rendered):
    """Inkling: every piece between tokens of its own, reasoning kept for ever; text only here.

    Open argument: `reasoning_effort`.
    """

    name = "inkling"
    variants = _variants("inkling")
    tokens = (
        "<|message_user|>",
        "<|message_model|>",
        "<|message_system|>",
        "<|message_tool|>",
        "<|content_text|>",
        "<|content_thinking|>",
        "<|content_image|>",
        "<|content_audio_input|>",
        "<|content_xml|>",
        "<|content_invoke_tool_json|>",
        "<|content_invoke_tool_text|>",
        "<|content_model_end_sampling|>",
        "<|end_message|>",
        "<|audio_end|>",
        "<|unused_200054|>",
        "<|unused_200053|>",
    )
    open_arguments = ("reasoning_effort",)
    results_by_name = True

    @classmethod
    def spell(cls, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A turn that only calls tools has no text, which is not the same as an empty one."""
        return [
            {**m, "content": None} if m.get("tool_calls") and not m["content"] else m
            for m in messages
        ]
