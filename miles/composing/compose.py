"""Hydra's part of a configuration: the override grammar, the search path, the defaults lists.

Reads files and words, and gives plain values back; what they mean for a run is `miles.config`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from miles.errors import ConfigError, PluginConflict, choices
from miles.plugins import Registry
from miles.protocols import KINDS

__all__ = [
    "AUTO",
    "Assignment",
    "Files",
    "Layer",
    "Node",
    "assignment",
    "expand",
    "own_folder",
    "parse",
    "quoted",
]

AUTO = "auto"
"""The tito handler that the chosen model names; the one choice that is no component."""

_FOLDERS: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("folders", default=())


class MilesSearchPath(SearchPathPlugin):
    """Adds the folders that plugins and the command line name, after miles' own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append them in order."""
        for provider, folder in _FOLDERS.get():
            search_path.append(provider, folder)


Plugins.instance().register(MilesSearchPath)


# ---------------------------------------------------------------- the command line


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One override, parsed."""

    key: tuple[str, ...]
    """The dotted key, split."""
    value: Any
    """A plain value; None for a deletion."""
    delete: bool
    """Written with `~`."""
    add: bool
    """Written with `+`."""
    text: str
    """As it was written."""


def _override(text: str) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        what = str(error).splitlines()[0]
        hint = "" if "=" in text or text.startswith("~") else "; an override is KEY=VALUE"
        raise ConfigError(f"override {text!r} cannot be read: {what}{hint}") from None


def parse(text: str) -> Assignment:
    """Read one override by Hydra's grammar. Raises `ConfigError`."""
    found = _override(text)
    if found.package is not None:
        raise ConfigError(f"override {text!r}: packages (@{found.package}) have no meaning here")
    if found.is_sweep_override():
        raise ConfigError(f"override {text!r} holds several values; sweep over them with -m")
    value = _plain(found.value())
    return Assignment(
        key=tuple(found.key_or_group.replace("/", ".").split(".")),
        value=value,
        delete=found.is_delete(),
        add=found.is_add() or found.is_force_add(),
        text=text,
    )


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """Every job of a sweep: the product of overrides such as `a=1,2`, `range(...)`, `choice(...)`.
    Raises `ConfigError`."""
    axes = []
    for text in overrides:
        found = _override(text)
        if not found.is_sweep_override():
            axes.append([text])
            continue
        key = text.partition("=")[0]
        axes.append([f"{key}={value}" for value in found.sweep_string_iterator()])
    return [list(job) for job in itertools.product(*axes)]


_PATHS = {"path", "dir", "file", "resume", "plugins"}
_SWEPT = re.compile(r"choice\(.*\)$", re.DOTALL)


def quoted(text: str) -> str:
    """An override whose key holds a path, with the path in quotes for Hydra: it may then have
    `=`, spaces, commas and parentheses. Other overrides, quoted paths and `null` stay."""
    key, equals, value = text.partition("=")
    plain = key.lstrip("+~")
    if not equals or (plain.split(".")[-1] not in _PATHS and plain != "run.name"):
        return text
    if value in ("", "null", "[]") or value[0] in "'\"" or _SWEPT.match(value):
        return text
    if value.startswith("[") and value.endswith("]"):
        items = re.findall(r"'[^']*'|\"[^\"]*\"|[^,]+", value[1:-1])
        return f"{key}=[{','.join(_quote(item.strip()) for item in items)}]"
    return f"{key}={_quote(value)}"


def _quote(value: str) -> str:
    return value if value[:1] in ("'", '"') else _in_quotes(value)


def _in_quotes(value: str) -> str:
    """Hydra reads backslashes as they are, except before a quote: those are doubled."""
    inner = re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return f"'{inner}'"


def assignment(key: str, paths: str | Iterable[str]) -> str:
    """The override that sets a key to a path or a list of paths, whatever is in them but `${`."""
    if isinstance(paths, str):
        return f"{key}={_in_quotes(paths)}"
    return f"{key}=[{','.join(_in_quotes(path) for path in paths)}]"


# ---------------------------------------------------------------- the files


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One choice of a kind, as its file says."""

    name: str
    """The component's registered name."""
    values: Mapping[str, Any]
    """Fields set by the file."""
    label: str
    """The file, for people; empty when there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One file of the defaults list that is not a component's."""

    values: Mapping[str, Any]
    """Its body."""
    label: str
    """The file, for people."""
    chooses: tuple[str, ...]
    """Groups for which its defaults list names a choice."""


class Files:
    """Every YAML file that can be reached: miles' own, those of plugins, those of `--config-dir`.

    Raises `ConfigError` for a folder that does not exist.
    """

    def __init__(self, registry: Registry, folders: Iterable[str | Path] = ()) -> None:
        self._registry = registry
        named = [("--config-dir", str(Path(f).expanduser().resolve())) for f in folders]
        self._folders = (*named, *registry.config_paths())
        for who, folder in self._folders:
            if "://" not in folder and not Path(folder).is_dir():
                raise ConfigError(f"config folder {folder} of {who} does not exist")
        store = ConfigStore.instance()
        for kind in KINDS:
            for name in (*registry.names(kind), *((AUTO,) if kind == "tito" else ())):
                store.store(group=kind, name=name, node={"name": name}, provider="miles")
        token = _FOLDERS.set(self._folders)
        try:
            with initialize_config_dir(str(own_folder()), job_name="miles", version_base="1.3"):
                self._loader = GlobalHydra.instance().config_loader()
        finally:
            _FOLDERS.reset(token)
        sources = self._loader.get_sources()
        self._sources = [s for s in sources if s.scheme() != "structured" and s.provider != "hydra"]
        self._parsed: dict[str, Any] = {}
        for source in self._sources:
            if not source.available():
                raise ConfigError(f"config folder {source.path} of {source.provider} is missing")

    def options(self, group: str) -> list[str]:
        """Every file of a group, without `.yaml`, and every registered name of a kind."""
        found = {name for source in self._sources for name in _files_below(source, group)}
        return sorted(found | set(self._registry.names(group) if group in KINDS else ()))

    def node(self, kind: str, choice: str) -> Node:
        """What choosing `choice` means. Raises `ConfigError` when there is no such choice, and
        `PluginConflict` when two folders hold its file."""
        path = f"{kind}/{choice}"
        found = [s for s in self._sources if s.is_config(path)]
        if not found:
            if choice not in self._registry.names(kind):
                self._registry.entry(kind, choice)  # says what is blocked, and gives the choices
            return Node(name=choice, values={}, label="")
        chain = [path]
        if "defaults" in self._read(path):
            with _reading(path):
                listed = self._loader.compute_defaults_list(path, [], RunMode.RUN).defaults
            chain = [d.config_path for d in listed if d.config_path.startswith(f"{kind}/")]
        values: dict[str, Any] = {"name": choice}
        for part in chain:
            body = self._read(part)
            body.pop("defaults", None)
            values = OmegaConf.to_container(OmegaConf.merge(values, body), resolve=False)  # type: ignore[assignment]
        return Node(name=values.pop("name"), values=values, label=self._label(path))

    def layers(self, experiment: Any) -> tuple[dict[str, list[str]], list[Layer]]:
        """(choices by kind, files in the order they are merged) of `config.yaml` with an
        experiment. Raises `ConfigError`."""
        for name in [experiment] if isinstance(experiment, str) else experiment or ():
            if name not in self.options("experiment"):
                what = choices(name, self.options("experiment"))
                raise ConfigError(f"there is no experiment {name!r}; {what}")
            self._read(f"experiment/{name}")  # a fault in it is told with its file
        overrides = []
        if experiment is None:
            overrides = ["~experiment"]
        elif experiment:
            many = "[" + ",".join(experiment) + "]"
            overrides = [f"experiment={experiment if isinstance(experiment, str) else many}"]
        with _reading("config.yaml"):
            listed = self._loader.compute_defaults_list("config", overrides, RunMode.RUN).defaults
        chosen: dict[str, list[str]] = {}
        layers = []
        for default in listed:
            path = default.config_path
            group, _, name = path.partition("/")
            if path.startswith("hydra"):
                continue
            if group in KINDS:
                if not (default.parent or "").startswith(f"{group}/"):
                    chosen.setdefault(group, []).append(name)
                continue
            body = self._read(path)
            groups = [key for d in body.pop("defaults", ()) if isinstance(d, dict) for key in d]
            layers.append(
                Layer(
                    values=body,
                    label=self._label(path),
                    chooses=tuple(str(g).removeprefix("override ").lstrip("/") for g in groups),
                )
            )
        return chosen, layers

    def default_experiment(self) -> str | None:
        """The experiment that `config.yaml` names."""
        for default in self._read("config").get("defaults", ()):
            if isinstance(default, dict) and "experiment" in default:
                return default["experiment"]  # type: ignore[no-any-return]
        return None

    def _source(self, path: str) -> Any:
        found = [s for s in self._sources if s.is_config(path)]
        if not found:
            raise ConfigError(f"there is no file {path}.yaml on the search path")
        if len(found) > 1:
            where = " and by ".join(f"{s.path} ({s.provider})" for s in found)
            raise PluginConflict(f"{path}.yaml is offered by {where}")
        return found[0]

    def _read(self, path: str) -> dict[str, Any]:
        with _reading(f"{path}.yaml"):
            if path not in self._parsed:  # several questions are answered from the same files
                self._parsed[path] = self._source(path).load_config(path).config
            body = OmegaConf.to_container(self._parsed[path])
        if not isinstance(body, dict):
            raise ConfigError(f"{self._label(path)}: expected keys and values")
        return body  # type: ignore[return-value]

    def _label(self, path: str) -> str:
        source = self._source(path)
        if source.provider == "main":
            return f"conf/{path}.yaml"
        return f"{source.path}/{path}.yaml"


@contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        found = ConfigError(f"{what}: {error}")
        if "override /" in str(error) or "Could not override" in str(error):
            found.add_note(
                "an experiment chooses in its body, `KIND: NAME`, or begins with "
                "`# @package _global_` to use Hydra's `override /KIND: NAME`"
            )
        raise found from error


def _files_below(source: Any, group: str) -> Iterator[str]:
    if not source.is_group(group):
        return
    for name in source.list(group, None):
        path = f"{group}/{name}"
        if source.is_config(path):
            yield name
        if source.is_group(path):
            yield from (f"{name}/{below}" for below in _files_below(source, path))


def own_folder() -> Path:
    """The folder of miles' own YAML: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "_conf"
    return inside if inside.is_dir() else package.parent / "conf"
