"""`report.html`: one self-contained page about a run, from the files in its directory.

It works on a run in progress and needs no network, no server and no plotting library; reading the
files is `miles.records.record`, drawing is `miles.records.curves`.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from miles.records.curves import Panel, Point, Series, bars, chart, short
from miles.records.record import Line, Record, read

__all__ = ["write"]

_log = logging.getLogger(__name__)
_TIMES = ("wait", "train", "publish", "eval_wait", "overhead")
_SHOWN_SAMPLES = 12


def write(run_dir: Path | str) -> Path:
    """Write `report.html` into a run directory and return its path.

    Raises `ConfigError` when there is no run in the directory, `OSError` when it cannot be written.
    """
    record = read(run_dir)
    path = record.directory / "report.html"
    if record.outcome == "unrecorded":
        _log.warning("%s is empty: %s", path, record.why)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(_page(record), encoding="utf-8")
    partial.replace(path)
    return path


def _page(record: Record) -> str:
    name = escape(record.directory.resolve().name)
    style, script = (
        Path(__file__).with_name(f"report.{kind}").read_text() for kind in ("css", "js")
    )
    parts = [
        _head(record, name),
        _tiles(record),
        f'<section class="charts">{"".join(_charts(record))}</section>',
        _evaluations(record),
        _warnings(record),
        _samples(record),
        _provenance(record),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{name} · miles</title><style>{style}</style></head>"
        f"<body><main>{''.join(parts)}</main>"
        f"<div id=tip></div><script>{script}</script></body></html>\n"
    )


def _head(record: Record, name: str) -> str:
    stages = " → ".join(
        f"{escape(s)} {len(record.of(s))}/{record.planned.get(s, len(record.of(s)))}"
        for s in record.stages
    )
    state = escape(record.outcome)
    clock = _clock(record.seconds)
    return (
        f'<header><h1>{name} <em class="{state}">{state}</em></h1>'
        f"<p>{stages or 'no step yet'} · {clock} · {escape(str(record.directory))}</p></header>"
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


# ---------------------------------------------------------------- figures at a glance


def _tiles(record: Record) -> str:
    tiles = []
    for name, lines in _by_set(record).items():
        scores = [x[f"eval/{name}/score"] for x in lines if f"eval/{name}/score" in x]
        if scores:
            tiles.append((f"{name} score", short(scores[-1]), f"from {short(scores[0])}"))
    sampling = [s for s in record.stages if _column(record.of(s), "mismatch/logprob_abs_max")]
    stage = (sampling or list(record.stages) or [""])[-1]
    lines = record.of(stage)
    if rewards := _column(lines, "reward/mean"):
        few = max(1, min(10, len(rewards) // 4))
        first, last = _average(rewards[:few]), _average(rewards[-few:])
        tiles.append((f"reward, {stage}", short(last), f"from {short(first)}"))
    if worst := _column(record.steps, "mismatch/logprob_abs_max"):
        tiles.append(("largest mismatch", short(max(worst)), "nats, of any token"))
    if pace := _column(lines, "time/step_s"):
        tiles.append((f"time a step, {stage}", f"{median(pace) * 1e3:.0f} ms", "median"))
    if speed := _column(lines, "engine/tokens_per_s"):
        tiles.append(("engine", short(_average(speed)), "tokens per second"))
    if trained := _column(record.steps, "tokens/trained"):
        tiles.append(("trained", short(sum(trained)), f"tokens in {len(record.steps)} steps"))
    if bias := _column(lines, "length/bias"):
        share = f"{100 * bias[-1]:+.1f} %"
        tiles.append((f"length bias, {stage}", share, "trained against all that came back"))
    tiles += _conversation_tiles(record, lines)
    return '<section class="tiles">' + "".join(_tile(*t) for t in tiles) + "</section>"


def _conversation_tiles(record: Record, lines: Sequence[Line]) -> Iterable[tuple[str, str, str]]:
    """What matters where a trajectory has several turns; `lines` are those of the stage shown."""
    turns = _column(lines, "session/turns")
    if max(turns, default=0.0) <= 1:
        return
    yield "turns", short(turns[-1]), f"a trajectory, from {short(turns[0])}"
    mismatches = _column(record.steps, "session/token_mismatches")
    yield "token mismatches", short(sum(mismatches)), "in the whole run"
    if errors := _column(lines, "env/tools/errors"):
        yield "tool errors", short(errors[-1]), f"a trajectory, from {short(errors[0])}"
    if rate := _column(lines, "router/prefix_hit_rate"):
        yield "prefix-cache hits", f"{100 * _average(rate):.1f} %", "of prompt tokens"


def _tile(label: str, value: str, more: str) -> str:
    words = (f"<small>{escape(w)}</small>" for w in (label, more))
    return f"<div>{next(words)}<b>{escape(value)}</b>{next(words)}</div>"


def _column(lines: Iterable[Line], name: str) -> list[float]:
    return [x[name] for x in lines if isinstance(x.get(name), (int, float))]


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# ---------------------------------------------------------------- curves


def _charts(record: Record) -> Iterable[str]:
    def panels(*names: str) -> list[Panel]:
        words = {n: _word(n) for n in names}
        return _panels(record, lambda line: words)

    yield chart("Reward", panels("reward/mean"), unit="mean over trajectories")
    yield chart(
        "Evaluation", _scores(record), unit="mean reward ± standard error", floor=0.0, ceiling=1.0
    )
    mismatch = ("logprob_abs_max", "logprob_abs_mean", "k3")
    yield chart(
        "Mismatch of trainer and rollout",
        panels(*(f"mismatch/{n}" for n in mismatch)),
        unit="nats, log scale",
        log=True,
    )
    yield chart(
        "Where a step's time goes",
        panels(*(f"time/{n}_s" for n in _TIMES)),
        unit="seconds",
        stacked=True,
    )
    for panel in _panels(record, _terms):
        yield chart(f"Loss terms, {panel.name}", [panel], unit="per step")
    yield chart("Gradient norm", panels("grad_norm"), unit="before clipping", floor=0.0)
    yield chart("Length", panels("length/mean"), unit="tokens a trajectory", floor=0.0)
    if _column(record.steps, "length/bias"):
        yield chart(
            "Length of what was trained, and of all that came back",
            panels("length/trained", "length/returned"),
            unit="sampled tokens, mean since the stage began",
            floor=0.0,
        )
        yield chart("Truncated", panels("samples/truncated"), unit="share", floor=0.0, ceiling=1.0)
    yield chart("Trained tokens", panels("tokens/trained"), unit="tokens a step", floor=0.0)
    yield chart("Turns", panels("session/turns"), unit="a trajectory", floor=0.0)
    yield chart("Token mismatches", panels("session/token_mismatches"), unit="in a step", floor=0.0)
    yield chart(
        "Prefix-cache hit rate",
        panels("router/prefix_hit_rate"),
        unit="share of prompt tokens",
        floor=0.0,
        ceiling=1.0,
    )
    yield from _asynchrony(record, panels)
    yield chart("Engine speed", panels("engine/tokens_per_s"), unit="tokens per second", floor=0.0)
    yield chart(
        "Groups", panels("groups/in_flight", "groups/buffered"), unit="at the step's end", floor=0.0
    )
    for environment in _environment_names(record):
        yield chart(environment, panels(environment), unit="environment's own metric")
    yield bars("Time by stage", [(s, _times(record.of(s))) for s in record.stages], unit="seconds")
    dropped = [(s, _sums(record.of(s), "groups/dropped/")) for s in record.stages]
    yield bars("Dropped groups", dropped, unit="groups, by reason")


def _asynchrony(record: Record, panels: Callable[..., list[Panel]]) -> Iterable[str]:
    """How old what is trained and what waits is."""
    lags = ("mean", "max", "waiting_mean", "waiting_max")
    yield chart(
        "Staleness", panels(*(f"staleness/{n}" for n in lags)), unit="trainer steps", floor=0.0
    )
    if max(_column(record.steps, "staleness/max"), default=0):
        yield chart(
            "Trained tokens by age", _panels(record, _token_lags), unit="tokens", stacked=True
        )
        histogram = [(s, _sums(record.of(s), "staleness/lag_")) for s in record.stages]
        yield bars("Trained groups by staleness", histogram, unit="groups, by trainer steps")
    if max(_column(record.steps, "buffer/age_max_s"), default=0):
        ages = panels("buffer/age_mean_s", "buffer/age_max_s")
        yield chart("Age of groups that wait", ages, unit="seconds", floor=0.0)


def _panels(record: Record, names: Callable[[Line], Mapping[str, str]]) -> list[Panel]:
    """One panel a stage; `names` says which metrics of a line to show, and what to call them."""
    made = []
    for stage in record.stages:
        lines = record.of(stage)
        wanted = {k: v for line in lines for k, v in names(line).items()}
        series = [
            Series(name=label, points=[(x["step"], _number(x.get(name))) for x in lines])
            for name, label in wanted.items()
        ]
        made.append(Panel(name=stage, series=series))
    return made


def _word(name: str) -> str:
    """A metric's name in a legend."""
    kind, _, word = name.rpartition("/")
    return word.removesuffix("_s") if kind == "time" else word


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _terms(line: Line) -> Mapping[str, str]:
    return {k: k.removeprefix("loss/") for k in line if k.startswith("loss/")}


def _token_lags(line: Line) -> Mapping[str, str]:
    head = "tokens/lag_"
    return {k: f"{k.removeprefix(head)} steps old" for k in line if k.startswith(head)}


def _environment_names(record: Record) -> list[str]:
    return list(dict.fromkeys(k for x in record.steps for k in x if k.startswith("env/")))


def _scores(record: Record) -> list[Panel]:
    series = []
    for name, lines in _by_set(record).items():
        scored = [x for x in lines if f"eval/{name}/score" in x]
        points: list[Point] = [(x["step"], _number(x[f"eval/{name}/score"])) for x in scored]
        errors = [_number(x.get(f"eval/{name}/stderr")) for x in scored]
        series.append(Series(name=name, points=points, spread=errors, dots=True))
    return [Panel(name="", series=series)]


def _by_set(record: Record) -> dict[str, list[Line]]:
    sets: dict[str, list[Line]] = {}
    for line in record.evaluations:
        sets.setdefault(str(line.get("set")), []).append(line)
    return sets


def _times(lines: Sequence[Line]) -> list[tuple[str, float]]:
    return [(name, sum(_column(lines, f"time/{name}_s"))) for name in _TIMES]


def _sums(lines: Sequence[Line], head: str) -> list[tuple[str, float]]:
    """What each metric whose name begins so adds up to, largest first."""
    found: Counter[str] = Counter()
    for line in lines:
        for name in line:
            if name.startswith(head):
                found[name.removeprefix(head)] += int(line[name] or 0)
    return [(reason, float(n)) for reason, n in found.most_common()]


# ---------------------------------------------------------------- tables and texts


def _evaluations(record: Record) -> str:
    rows = []
    for line in record.evaluations:
        name = str(line.get("set"))
        own = {k.removeprefix(f"eval/{name}/"): v for k, v in line.items()}
        if (reason := own.get("skipped")) is not None:
            rows.append((line["step"], name, f"skipped: {reason}", "", ""))
            continue
        score = f"{short(_number(own.get('score')))} ± {short(_number(own.get('stderr')))}"
        if "low" in own and "high" in own:
            score += f" [{short(_number(own['low']))}, {short(_number(own['high']))}]"
        tried = [k for k in own if k.startswith("pass_") and k.count("_") == 1]
        more = (*tried, "failures", "length", "truncated", "seconds", "lag_steps")
        rest = ", ".join(f"{k} {short(_number(own[k]))}" for k in more if k in own)
        rows.append((line["step"], name, score, own.get("samples", ""), rest))
    if not rows:
        return ""
    return _section("Evaluations", _table(("step", "set", "score", "samples", ""), rows))


def _warnings(record: Record) -> str:
    """Warnings that differ in their numbers alone are one row: the last of them, and how many."""
    last: dict[str, str] = {}
    count: Counter[str] = Counter()
    for text in record.warnings:
        kind = "".join(c for c in text if not c.isdigit())
        last[kind] = text
        count[kind] += 1
    if record.unreadable:
        last["unreadable"] = "unreadable lines in metrics.jsonl or samples.jsonl, left out here"
        count["unreadable"] = record.unreadable
    rows = [(record.outcome, record.why)] if record.why else []
    rows += [(f"{count[kind]}×", text) for kind, text in last.items()]
    return _section("Warnings", _table(("", ""), rows)) if rows else ""


def _samples(record: Record) -> str:
    found = record.samples
    if not found:
        return ""
    stride = max(1, -(-len(found) // _SHOWN_SAMPLES))
    cards = [_card(line) for line in found[::-1][::stride]]
    return _section("Samples, newest first", f'<div class="cards">{"".join(cards)}</div>')


def _card(line: Line) -> str:
    task = line.get("task")
    task = task if isinstance(task, Mapping) else {}
    reward = short(_number(line.get("reward")))
    head = f"step {line.get('step')} · {line.get('stage', '')} · reward {reward}"
    if task.get("answer") is not None:
        head += f" · answer {task['answer']}"
    said = (
        f"{escape(_prompt(task.get('prompt', '')))}<mark>{escape(str(line.get('text', '')))}</mark>"
    )
    if line.get("conversation"):  # several turns, as the model saw and wrote them
        said = escape(str(line["conversation"]))
    return f"<article><small>{escape(head)}</small><pre>{said}</pre></article>"


def _prompt(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    messages = [m for m in prompt if isinstance(m, Mapping)] if isinstance(prompt, list) else []
    return "".join(f"{m.get('role')}: {m.get('content')}\n" for m in messages)


def _provenance(record: Record) -> str:
    parts = []
    if record.config:
        parts.append(
            f"<details><summary>Configuration</summary><pre>{escape(record.config)}</pre></details>"
        )
    for what, versions in record.plugins.items():
        if isinstance(versions, Mapping) and versions:
            table = _table((what, ""), sorted(versions.items()))
            parts.append(f"<details><summary>Plugins: {escape(what)}</summary>{table}</details>")
    return _section("What was run", "".join(parts)) if parts else ""


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    top = "".join(f"<th>{escape(h)}</th>" for h in head) if any(head) else ""
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )
