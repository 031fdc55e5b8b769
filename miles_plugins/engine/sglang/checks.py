"""What `miles check` can say of SGLang servers before any is started: what is missing, in use, too
small, or of another version.

It runs the interpreter that was named, asks `nvidia-smi`, and asks servers given by address what
they are; it imports no SGLang.
"""

from __future__ import annotations

import http.client
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import msgspec

from miles import (
    Claim,
    ConfigError,
    EngineError,
    Gpu,
    Spec,
    engine_bytes,
    engines_apart,
    gpu_room,
    gpus_here,
    memory_here,
    places_here,
)
from miles_plugins.engine.sglang import command, drafts, server, sources
from miles_plugins.engine.sglang import facts as says
from miles_plugins.engine.sglang.starting import key_of

__all__ = [
    "awaits",
    "check",
    "claims",
    "context_length",
    "listed",
    "topk",
    "url_faults",
    "warnings",
]

_ASK_S = 5.0  # to connect, and every part of an answer
_WHOLE_S = 10.0  # the whole answer
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # as the run asks: no proxy
_TOPK = ("num_experts_per_tok", "moe_topk", "num_experts_per_token")


def listed(text: str) -> list[str]:
    """Addresses separated by commas."""
    return [one.strip().rstrip("/") for one in text.split(",") if one.strip()]


def topk(model: Any) -> int:
    """Experts that a token has, 0 for a dense or unknown model."""
    config = {} if model is None else model.hf_config()
    config = config.get("text_config", config)
    return next((int(config[name]) for name in _TOPK if config.get(name)), 0)


def context_length(model: Any) -> int | None:
    """Longest prompt and completion of a checkpoint, in tokens, where it says so."""
    config = {} if model is None else model.hf_config()
    found = config.get("text_config", config).get("max_position_embeddings")
    return found if isinstance(found, int) else None


def url_faults(config: Any) -> list[str]:
    """Addresses that cannot be meant."""
    faults = []
    for name in ("url", "prefill_url"):
        urls = listed(getattr(config, name))
        for url in urls:
            if not url.startswith(("http://", "https://")):
                faults.append(
                    f"{name} is {url!r}; give the address of a running server, such as "
                    f"engine.{name}=http://127.0.0.1:30000"
                )
        if len(set(urls)) < len(urls):
            faults.append(f"{name}: an address is there twice: {', '.join(urls)}")
        if urls and config.workers > 1 and len(urls) < config.workers:
            faults.append(
                f"workers ({config.workers}) is more than the {len(urls)} addresses of {name}"
            )
    if config.prefill_url and len(listed(config.prefill_url)) != len(listed(config.url)):
        faults.append("prefill_url and url: they go in pairs, and need as many addresses")
    return faults


def check(cls: type, config: Any, planned: Any) -> Sequence[str]:
    """Faults of a stage's engine."""
    del cls
    faults = [*command.flag_faults(config), *url_faults(config)]
    settings = planned.settings
    if settings.session.experts and not topk(planned.built.get("model")):
        faults.append("session.experts: the model has no experts to ask for")
    if fault := drafts.fault(config.speculative, planned.built.get("model")):
        faults.append(fault)
    chosen = getattr(planned.specs.get("transport"), "name", "")
    if config.prefill_url and chosen in ("ipc", "nccl"):
        faults.append(
            f"prefill_url and transport={chosen}: servers that only prefill or decode take weights "
            "from files; use transport=disk"
        )
    if faults:
        return faults
    if config.url:
        return [*faults, *_running_faults(config, planned)]
    return [*faults, *_own_faults(config, planned)]


def awaits(cls: type, config: Any) -> str:
    """What the first answer waits for: servers of our own, or those of others."""
    del cls
    if config.url:
        return f"{config.url} to answer, at most {config.start_timeout_s:g} s (start_timeout_s)"
    if config.workers == 1:
        return "its server starts (logs/sglang-0.log)"
    return f"its servers start (logs/sglang-0.log to sglang-{config.workers - 1}.log)"


def warnings(cls: type, config: Any, planned: Any) -> Sequence[str]:
    """What is allowed and probably not meant."""
    del cls
    found = []
    if config.dp > 1 and not config.deterministic:
        found.append(
            f"engine.dp is {config.dp} and engine.deterministic is false: SGLang seeds all ranks "
            "of a server alike, so attempts at one task on several ranks can be copies; "
            "use engine.deterministic=true, or more engine.workers, which have seeds of their own"
        )
    algorithm = str(config.speculative.get("algorithm", ""))
    if algorithm and algorithm.upper() not in command.DRAFTING:
        known = ", ".join(sorted(command.DRAFTING))
        found.append(f"engine.speculative.algorithm: {algorithm} is not known; SGLang has {known}")
    try:
        versions = (
            {url: str(_info(url, key_of(config))["version"]) for url in listed(config.url)}
            if config.url
            else {"engine.python": _installed(config)}
        )
    except (ConfigError, EngineError, KeyError):
        return found  # a fault, which `check` says
    for where, version in versions.items():
        if doubt := says.doubt(version):
            found.append(f"{where}: {doubt}")
    return found


def claims(cls: type, config: Any, planned: Any) -> list[Claim]:
    """Of servers to be started: those that sample, and behind them those that only evaluate, which
    never sleep."""
    del cls
    if config.url or config.device != "cuda" or not (gpus := gpus_here()):
        return []
    local = places_here(planned)
    each, trainer = command.devices(config), planned.specs.get("trainer")
    sampling, evaluating = config.workers * each, engines_apart(planned) * each if local else 0
    ranks = int(trainer.config.get("workers", 1)) if isinstance(trainer, Spec) else 0
    wanted, middle = ranks + sampling + evaluating, config.first_gpu + sampling
    enough = f"engine.first_gpu={ranks}" if len(gpus) >= wanted else f"{wanted} GPUs"
    precision = planned.built.get("precision")
    about = {
        "bytes": engine_bytes(planned) / _sharing(config),
        "what": f"weights in {getattr(precision, 'engine', 'an unknown type')}",
        "apart": f"{enough} (there are {len(gpus)})",
    }
    found = [Claim(who="servers", gpus=range(config.first_gpu, middle), releases=True, **about)]
    if evaluating:
        behind = range(middle, middle + evaluating)
        found.append(Claim(who="evaluation servers", gpus=behind, releases=False, **about))
    return found


# ---------------------------------------------------------------- servers that run


def _running_faults(config: Any, planned: Any) -> Iterator[str]:
    versions = {}
    for url in [*listed(config.url), *listed(config.prefill_url)]:
        try:
            info = _info(url, key_of(config))
            found = says.facts(info)
        except (ConfigError, EngineError) as error:
            yield str(error).removeprefix("engine sglang: ")
            continue
        versions[url] = found.version
        yield from _unlike(url, found, config, planned.settings)
        yield from _other_precision(url, found, planned.built.get("precision"))
    yield from says.doubts(versions)


def _unlike(url: str, found: says.Facts, config: Any, settings: Any) -> Iterator[str]:
    """What a server was started without, or is not what it was given as."""
    if settings.session.experts and not found.experts:
        yield f"{url} returns no experts; start it with --enable-return-routed-experts"
    if settings.placement == "colocated" and not found.memory_saver:
        yield f"{url} cannot free its memory; start it with --enable-memory-saver"
    if config.deterministic and not found.deterministic:
        yield f"{url} has no seeds; start it with --enable-deterministic-inference"
    wanted = ""
    if config.prefill_url:
        wanted = "prefill" if url in listed(config.prefill_url) else "decode"
    if found.disaggregation != wanted:
        is_now = found.disaggregation or "null"
        yield f"{url} has --disaggregation-mode {is_now}; here it must be {wanted or 'null'}"


def _other_precision(url: str, found: says.Facts, precision: Any) -> Iterator[str]:
    """Where a server rounds other than the recipe says that engines do."""
    if precision is None:
        return
    wanted = precision.engine
    if found.dtype not in ("", wanted):
        yield (
            f"{url} computes in {found.dtype}, and engines of this precision in {wanted}; start it "
            f"with --dtype {wanted}"
        )
    whole = precision.logits == "float32" != wanted
    if found.whole_logits is not None and found.whole_logits != whole and wanted != "float32":
        yield (
            f"{url} was started {'with' if found.whole_logits else 'without'} "
            f"--enable-fp32-lm-head, and precision.logits is {precision.logits}"
        )


def _info(url: str, key: str) -> Mapping[str, Any]:
    """`/server_info`. Raises `EngineError` naming the address."""
    try:
        return _asked(f"{url}/server_info", key)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            with suppress(urllib.error.HTTPError):
                return _asked(f"{url}/get_server_info", key)  # its name before 0.5.16
        why = "is it the address of a server, without a path?"
        if error.code in (401, 403):
            why = f"it wants {'another' if key else 'a'} key, in a file: engine.api_key_file"
        raise EngineError(
            f"engine sglang: {url}/server_info answers HTTP {error.code} ({error.reason}); {why}"
        ) from error


def _asked(where: str, key: str) -> Mapping[str, Any]:
    """A JSON object. Raises `HTTPError` for an answer that is an error, else `EngineError`, also
    when it is not whole within `_WHOLE_S`."""
    said: Future[Mapping[str, Any]] = Future()

    def ask() -> None:
        try:
            said.set_result(_read(where, key))
        except (urllib.error.HTTPError, EngineError) as error:
            said.set_exception(error)

    # a server that drips keeps this thread, which the process does not wait for
    threading.Thread(target=ask, daemon=True).start()
    try:
        return said.result(_WHOLE_S)
    except TimeoutError:
        raise EngineError(
            f"engine sglang: {where} gave no whole answer within {_WHOLE_S:g} s; is it the address "
            "of an SGLang server?"
        ) from None


def _read(where: str, key: str) -> Mapping[str, Any]:
    try:
        request = urllib.request.Request(where)
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        with _DIRECT.open(request, timeout=_ASK_S) as reply:
            found = msgspec.json.decode(reply.read())
    except urllib.error.HTTPError:
        raise
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = str(error.reason if isinstance(error, urllib.error.URLError) else error)
        url = where.rpartition("/")[0]
        raise EngineError(
            f"engine sglang: {url} cannot be reached: {' '.join(why.split())}"
        ) from error
    if not isinstance(found, dict):
        raise EngineError(f"engine sglang: {where} is no object")
    return found


# ---------------------------------------------------------------- servers to be started


def _installed(config: Any) -> str:
    """SGLang's version where our own servers will run. Raises `ConfigError`."""
    return server.installed(config.python or sys.executable, config.environment)


def _own_faults(config: Any, planned: Any) -> Iterator[str]:
    try:
        _installed(config)
    except ConfigError as error:
        yield str(error).removeprefix("engine sglang: ")
    if (model := planned.built.get("model")) is not None:
        python = config.python or sys.executable
        if fault := sources.own_head(python, config.environment, model.hf_config()):
            yield fault
    servers = config.workers + engines_apart(planned)
    if config.port and config.port + servers - 1 > (last := command.LAST_PORT):
        yield (
            f"port: {servers} servers from port {config.port} on need ports up to "
            f"{config.port + servers - 1}, and {last} is the last; take at most "
            f"engine.port={last + 1 - servers}, or engine.port=0, which takes free ones"
        )
        return
    runtime = planned.specs.get("runtime")
    if isinstance(runtime, Spec) and runtime.name != "local":
        yield from _placed_faults(config, runtime)  # it knows which machines there are
        if config.device == "cuda":
            # as if others had GPUs like these
            yield from _gpu_memory(config, planned, gpu_room(gpus_here()))
        return
    if config.port:
        for port in range(config.port, config.port + servers):
            if fault := server.port_fault("127.0.0.1", port):
                yield f"{fault}; engine.port=0 takes a free one"
    if config.device == "cuda":
        gpus = gpus_here()
        yield from _gpu_faults(config, gpus, servers)
        end = config.first_gpu + servers * command.devices(config)
        yield from _gpu_memory(config, planned, gpu_room(gpus, range(config.first_gpu, end)))
        return
    need, room = engine_bytes(planned), memory_here()
    if need > room > 0:
        yield _too_small(
            planned, need, f"this machine's memory is {_gib(room)}; take a smaller model"
        )


def _gpu_memory(config: Any, planned: Any, each: int) -> Iterator[str]:
    need, shared = engine_bytes(planned), _sharing(config)
    part = config.memory_fraction or 0.9
    room = each * part * shared
    if need > room > 0:
        where = f"{shared} GPU{'s'[: shared > 1]} offer {_gib(room)} (memory_fraction {part:g})"
        yield _too_small(planned, need, f"{where}; take a larger engine.tp")


def _too_small(planned: Any, need: float, where: str) -> str:
    kind = planned.built["precision"].engine
    return f"the model's weights take about {_gib(need)} in {kind}, and {where}"


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"


def _sharing(config: Any) -> int:
    """GPUs among which one copy of the weights is divided."""
    return command.devices(config) // (1 if config.dp_attention else int(config.dp))


def _placed_faults(config: Any, runtime: Spec) -> Iterator[str]:
    """What a runtime that reserves GPUs for every engine worker must be told."""
    each = command.devices(config)
    if config.device != "cuda":
        return
    if config.first_gpu:
        yield f"first_gpu is {config.first_gpu}, and runtime={runtime.name} chooses the GPUs"
    gpus = dict(runtime.config.get("engine") or {}).get("gpus")
    if (1 if gpus is None else gpus) != each:
        yield f"one server takes {each} GPUs; say so: runtime.engine.gpus={each}"


def _gpu_faults(config: Any, gpus: Sequence[Gpu], servers: int) -> Iterator[str]:
    if not gpus:
        yield (
            "device is cuda, and there is no GPU here (no nvidia-smi or driver shows one); use "
            "device=cpu"
        )
        return
    each = command.devices(config)
    wanted = config.first_gpu + servers * each
    if wanted > len(gpus):
        yield (
            f"{servers} servers of {each} GPUs from GPU {config.first_gpu} on need {wanted} GPUs, "
            f"and there are {len(gpus)}"
        )
