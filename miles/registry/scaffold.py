"""`miles plugins new`: a distribution with an environment, its YAML, a hook and tests, to publish.

Writes files and nothing else; what it writes is an example of the public surface.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection
from pathlib import Path
from string import Template

from miles.errors import ConfigError

__all__ = ["write"]

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def write(name: str, into: str | Path, *, taken: Collection[str] = ()) -> Path:
    """Make `into`/miles-plugin-`name` and return it.

    `taken` holds names of environments that exist. Raises `ConfigError` for a name that cannot be
    a package, one that is taken, or a folder that exists.
    """
    word = name.replace("-", "_")
    if not _NAME.fullmatch(name) or keyword.iskeyword(word):
        raise ConfigError(
            f"{name!r} cannot name a plugin: lower-case letters and digits, parts joined by single "
            "hyphens, beginning with a letter, such as word-game"
        )
    if word in taken:
        raise ConfigError(f"there is an environment {word!r} already; choose another name")
    root = Path(into).expanduser() / f"miles-plugin-{name}"
    if root.exists():
        raise ConfigError(f"{root} exists; nothing was written")
    values = {
        "name": name,
        "word": word,
        "package": f"miles_plugin_{word}",
        "cls": "".join(part.capitalize() for part in name.split("-")),
    }
    for path, text in _FILES.items():
        file = root / Template(path).substitute(values)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(Template(text).substitute(values), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {file}: {error.strerror}") from error
    return root


_PYPROJECT = """\
[build-system]
requires = ["hatchling>=1.26"]
build-backend = "hatchling.build"

[project]
name = "miles-plugin-$name"
version = "0.1.0"
description = "An environment for miles: a word is spelled backwards"
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["miles>=0.1,<1"]

[project.optional-dependencies]
test = ["pytest>=8.3"]

# a component: a name that users choose, imported when they do
[project.entry-points."miles.environment"]
$word = "$package.environment:$cls"

# hooks: moments that this plugin watches; the module is imported at every start
[project.entry-points.miles]
$word = "$package.plugin"

[tool.pytest.ini_options]
testpaths = ["tests"]

[tool.hatch.build.targets.wheel]
packages = ["src/$package"]
"""

_README = """\
# miles-plugin-$name

An environment for miles: the model is shown a word and spells it backwards.

    pip install -e '.[test]'
    pytest
    miles plugins check miles-plugin-$name --contract

    miles run experiment=$word                           # train a tiny model on it, on a CPU
    miles run experiment=$word environment.length=5      # longer words
    miles plugins show environment $word                 # every key

Where things are:

- `src/$package/environment.py`: tasks, episodes and rewards. Make it yours here.
- `src/$package/plugin.py`: hooks. It must stay quick to import.
- `src/$package/conf/`: YAML that Hydra finds: a preset of the environment, and an experiment.
- `pyproject.toml`: the two entry points by which miles finds all this.
"""

_ENVIRONMENT = '''\
"""Spell a word backwards: tasks, episodes and their worth.

Imports no torch: an environment deals in text, and the loop in tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from string import ascii_lowercase

from miles import ConfigError, Context, SingleTurn, Split, Task, derive_seed


class $cls:
    """A word of random letters; the reward is the share of letters that are in their place."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        """Which words."""

        length: int = 3
        """Letters of a word: the difficulty."""
        train: int = 1024
        """Training words."""
        heldout: int = 128
        """Held-out words, none of them among the training words."""

    def __init__(self, config: Config, context: Context) -> None:
        if config.length < 1 or min(config.train, config.heldout) < 0:
            raise ConfigError("environment $word: length below 1, or a negative count of words")
        wanted = config.train + config.heldout
        if 26**config.length < 2 * wanted:
            raise ConfigError(
                f"environment $word: there are {26**config.length} words of length "
                f"{config.length}, too few to draw {wanted} from; raise environment.length"
            )
        self._words = _words(config.length, wanted, derive_seed(context.seed, "$word"))
        self._train = config.train

    def tasks(self, split: Split) -> Sequence[Task]:
        """The same words in the same order every time."""
        words = self._words[: self._train] if split == "train" else self._words[self._train :]
        return [
            Task(id=word, prompt=f"{word}>", answer=word[::-1], solution=word[::-1])
            for word in words
        ]

    def episode(self, task: Task, seed: int) -> SingleTurn:
        """One turn."""
        return SingleTurn(task.prompt, partial(score, task.answer), environment="$word")


def score(answer: str, text: str) -> float:
    """Share of letters in their place; letters too many count as wrong."""
    right = sum(a == b for a, b in zip(answer, text, strict=False))
    return right / max(len(answer), len(text))


def _words(length: int, count: int, seed: int) -> list[str]:
    """Distinct words of random letters."""
    draw = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(draw.choices(ascii_lowercase, k=length))] = None
    return list(found)
'''

_PLUGIN = '''\
"""Hooks of this plugin: where its YAML is, and a line in the log now and then.

Imported at every start of miles, so it imports nothing heavy.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from miles import hookimpl

log = logging.getLogger("$package")


@hookimpl
def miles_config_paths() -> str:
    """The folder of `environment/$word.yaml` and `experiment/$word.yaml`."""
    return str(Path(__file__).parent / "conf")


@hookimpl
def miles_step_finished(step: int, metrics: Mapping[str, float]) -> None:
    """Say now and then how it goes. A hook takes only those arguments that it needs."""
    if step % 50 == 0:
        log.info("step %d: mean reward %.3f", step, metrics.get("reward/mean", float("nan")))
'''

_EXPERIMENT = """\
# Imitate a little, then reinforce what is right; `miles run experiment=$word`.
environment: $word
tito: bytes

stages:
  sft:
    engine: demonstration
    algorithm: sft
    steps: 300
    groups_per_step: 32
    samples_per_group: 1
    trainer: {lr: 3e-3}
  grpo:
    steps: 60
    groups_per_step: 16
    samples_per_group: 8
    max_new_tokens: 16
    trainer: {lr: 5e-4}
"""

_TESTS = '''\
"""The environment keeps its kind's contract, composes, and says what it should."""

import logging

import pytest
from miles import ConfigError, Spec
from miles.cli import main

from $package.environment import score


@pytest.mark.miles_contract("environment", "$word")
def test_environment_keeps_the_contract(miles_contract):
    miles_contract()


@pytest.mark.parametrize(
    ("text", "reward"), [("cba", 1.0), ("cbx", 2 / 3), ("abc", 1 / 3), ("", 0.0), ("cba!", 0.75)]
)
def test_score_counts_letters_in_their_place(text, reward):
    assert score("cba", text) == pytest.approx(reward)


def test_environment_refuses_too_few_words(miles_registry, miles_context):
    spec = Spec(kind="environment", name="$word", config={"length": 1})
    with pytest.raises(ConfigError, match="too few"):
        miles_registry.build(spec, miles_context)


def test_experiment_passes_the_check(capsys):
    assert main(["check", "experiment=$word"]) == 0, capsys.readouterr().out


def test_step_finished_logs_the_reward(miles_registry, caplog):
    with caplog.at_level(logging.INFO, logger="$package"):
        miles_registry.hook.step_finished(
            step=50, groups=(), update=None, metrics={"reward/mean": 0.5}
        )
    assert "step 50: mean reward 0.500" in caplog.text
'''

_FILES = {
    "pyproject.toml": _PYPROJECT,
    "README.md": _README,
    ".gitignore": "__pycache__/\n*.egg-info/\ndist/\nruns/\n",
    "src/$package/__init__.py": '"""An environment for miles; see `environment` and `plugin`."""\n',
    "src/$package/environment.py": _ENVIRONMENT,
    "src/$package/plugin.py": _PLUGIN,
    "src/$package/conf/environment/$word.yaml": "name: $word\n",
    "src/$package/conf/experiment/$word.yaml": _EXPERIMENT,
    "tests/test_$word.py": _TESTS,
}
