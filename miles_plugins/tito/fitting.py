"""Holds a family against a checkpoint: special tokens, stop ids, template arguments, and which of
the published templates it has.

A checkpoint with a template of its own is asked; the first variant that writes the same ids for
every probe is its own. Nothing is guessed from names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from miles import ConfigError, EpisodeError, choices
from miles_plugins.tito.template import Template, plain
from miles_plugins.tito.vocabulary import Vocabulary

if TYPE_CHECKING:
    from miles_plugins.tito.rendered import Rendered, Variant

__all__ = ["fit"]

_REFUSALS = (ValueError, TypeError, LookupError, AttributeError, AssertionError)
"""What the library raises for messages, arguments and tokenizers that it cannot use."""

_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "Where."}},
            "required": ["place"],
        },
    },
}
_CALLS = [
    {
        "id": f"functions.look_up:{number}",
        "type": "function",
        "function": {"name": "look_up", "arguments": arguments},
    }
    for number, arguments in enumerate(
        ({"place": "Zürich"}, {"place": "New York", "days": 2, "with": {"wind": True}})
    )
]


def _said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _results(count: int) -> list[dict[str, Any]]:
    return [
        _said("tool", f"sunny {n}", tool_call_id=_CALLS[n]["id"], name="look_up")
        for n in range(count)
    ]


def _probes() -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Conversations and the tools offered in them; together they show what variants differ in."""
    system, user = _said("system", "Be brief."), _said("user", "What is new?")
    thought = _said("assistant", "Nothing.", reasoning_content="They ask.")
    one = _said("assistant", "", tool_calls=_CALLS[:1])
    two = _said("assistant", "", reasoning_content="Two places.", tool_calls=_CALLS)
    yield [user], []
    yield [system, user], []
    yield [user], [_TOOL]
    yield [system, user], [_TOOL]
    yield [user, _said("assistant", "Nothing."), user], []
    yield [user, thought, user], []
    yield [system, user, one, *_results(1)], [_TOOL]
    yield [user, two, *_results(2)], [_TOOL]
    yield [user, two, *_results(2), thought, user], [_TOOL]


def fit(family: type[Rendered], vocabulary: Vocabulary, config: Any) -> tuple[Variant, Any]:
    """The variant that is the checkpoint's, and its renderer.

    Raises `ConfigError` when the family is not the checkpoint's: what is missing or differs, and
    what instead.
    """
    who = family.name
    missing = [t for t in family.tokens if vocabulary.tokenizer.token_to_id(t) is None]
    if missing:
        error = ConfigError(
            f"tito {who} does not fit the tokenizer in {vocabulary.directory}: it has no special "
            f"token {', '.join(missing)}"
        )
        error.add_note("tito=auto takes the family of the checkpoint, tito=generic any template")
        raise error
    _refuse_unverified(family, vocabulary, config)
    closest, found = -1, ""
    for variant in family.variants:
        renderer = _make(family, variant, vocabulary, config.arguments)
        if renderer is None:
            continue
        _refuse_other_stops(who, renderer, vocabulary)
        agreed, difference = _compare(family, renderer, vocabulary, config.arguments)
        if not difference:
            _keep_markup_apart(renderer, vocabulary)
            return variant, renderer
        if agreed > closest:
            closest, found = agreed, f"{variant.renderer}: {difference}"
    if closest < 0:
        raise ConfigError(
            f"tito {who}: no published template of this family takes the arguments "
            f"{dict(config.arguments)}"
        )
    error = ConfigError(
        f"tito {who} does not fit the checkpoint {vocabulary.directory}: its chat template writes "
        f"something else than every published one of the family; the closest is {found}"
    )
    error.add_note("tito=generic uses the checkpoint's own template")
    raise error


def _refuse_unverified(family: type[Rendered], vocabulary: Vocabulary, config: Any) -> None:
    if config.unverified or vocabulary.template:
        return
    if not family.verified:
        why = "its markup was held against no published template"
    elif len(family.variants) > 1:
        names = ", ".join(v.renderer for v in family.variants)
        why = f"the checkpoint has no chat template to tell which variant it is ({names})"
    else:
        return
    raise ConfigError(
        f"tito {family.name} is unverified for {vocabulary.directory}: {why}; "
        "tito.unverified=true uses it all the same"
    )


def _refuse_other_stops(who: str, renderer: Any, vocabulary: Vocabulary) -> None:
    stops = set(renderer.get_stop_token_ids())
    other = sorted(vocabulary.declared_stops - stops)
    if not other:
        return
    names = [vocabulary.decode([i]) for i in other]
    raise ConfigError(
        f"tito {who} does not fit the checkpoint {vocabulary.directory}: it ends a turn with "
        f"{', '.join(names)} (ids {other}), the family with "
        f"{', '.join(vocabulary.decode([i]) for i in sorted(stops))} (ids {sorted(stops)})"
    )


def _make(
    family: type[Rendered], variant: Variant, vocabulary: Vocabulary, chosen: Mapping[str, Any]
) -> Any:
    """The renderer of a variant; None when the variant has no argument of a chosen name."""
    from renderers import config_from_name, create_renderer, template_field_names

    plain_config: Any = config_from_name(variant.renderer)
    known = template_field_names(plain_config)
    for name, value in chosen.items():
        fixed = variant.arguments.get(name, getattr(plain_config, name, None))
        if name not in family.open_arguments and value != fixed:
            what = f"{fixed!r}" if name in known else "not one of the family's arguments"
            raise ConfigError(
                f"tito.arguments: {name}={value!r} conflicts with tito {family.name}, where it is "
                f"{what}; open are: {choices(name, family.open_arguments)}"
            )
    if not set(chosen) <= known:
        return None
    # a turn keeps its reasoning when the next user speaks: what was sampled is never taken back
    fields = {"thinking_retention": "all", **variant.arguments, **chosen}
    try:
        return create_renderer(vocabulary, type(plain_config)(**fields))
    except _REFUSALS as error:
        raise ConfigError(
            f"tito {family.name}: {variant.renderer} with {dict(chosen)} cannot be used with the "
            f"tokenizer in {vocabulary.directory}: {error}"
        ) from error


def _compare(
    family: type[Rendered], renderer: Any, vocabulary: Vocabulary, chosen: Mapping[str, Any]
) -> tuple[int, str]:
    """How many probes agree with the checkpoint's template, and where the first one does not."""
    if not vocabulary.template:
        return 0, ""
    who = family.name
    variables = {**vocabulary.named, **chosen}
    template = Template(vocabulary.template, who=who, variables=variables)
    agreed = 0
    silent = not getattr(renderer.config, "enable_thinking", True)
    for probe, offered in _probes():
        tools = [] if family.tools_by_code else offered
        if silent and any(m["role"] == "assistant" for m in probe):
            continue  # the library keeps the empty thought that the prompt put before old turns
        messages = family.spell(plain(probe, who=who))
        try:
            text = template.render(messages, tools=tools, opened=True)
        except EpisodeError:
            continue  # not every template takes every role or field
        try:
            ours = renderer.render_ids(messages, tools=tools or None, add_generation_prompt=True)
        except _REFUSALS as error:
            return agreed, f"it refuses what the checkpoint's template takes: {error}"
        theirs = vocabulary.encode(text)
        if ours != theirs:
            return agreed, _difference(vocabulary, theirs, ours)
        agreed += 1
    return agreed, "" if agreed else "the checkpoint's template refuses every probe"


def _difference(vocabulary: Vocabulary, theirs: list[int], ours: list[int]) -> str:
    pairs = zip(theirs, ours, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(theirs), len(ours)))
    window = slice(max(0, at - 4), at + 12)
    return (
        f"at token {at} the checkpoint's template has {vocabulary.decode(theirs[window])!r}, "
        f"it {vocabulary.decode(ours[window])!r}"
    )


def _keep_markup_apart(renderer: Any, vocabulary: Vocabulary) -> None:
    """Let special tokens spelled out in a text stay text, where the family's own markup does not
    pass through text as well."""
    written = [_written(renderer, *probe) for probe in _probes()]
    vocabulary.plain = True
    vocabulary.plain = written == [_written(renderer, *probe) for probe in _probes()]


def _written(renderer: Any, messages: list[Any], tools: list[Any]) -> list[int]:
    try:
        ids: list[int] = renderer.render_ids(
            messages, tools=tools or None, add_generation_prompt=True
        )
    except _REFUSALS:
        return []
    return ids
