"""The command that starts a server: from an engine's keys to `python -m sglang.launch_server` and
its flags.

Pure functions; what is started, and stopped, is `server`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles import ConfigError

__all__ = ["DRAFTING", "LAST_PORT", "OURS", "arguments", "devices", "flag_faults", "flags"]

OURS = frozenset(
    word
    for line in (
        "model_path tokenizer_path host port api_key admin_api_key device dtype load_format config",
        "enable_fp32_lm_head",
        "tp_size tp tensor_parallel_size dp_size dp data_parallel_size enable_dp_attention",
        "base_gpu_id context_length max_running_requests mem_fraction_static random_seed",
        "enable_deterministic_inference enable_return_routed_experts enable_memory_saver",
        "skip_tokenizer_init weight_version served_model_name disaggregation_mode",
    )
    for word in line.split()
)
"""Flags that follow from other keys."""

DRAFTING = frozenset(
    "DFLASH DSPARK EAGLE EAGLE3 FROZEN_KV_MTP NEXTN NGRAM STANDALONE UNO".split()  # noqa: SIM905
)
"""Algorithms of speculative decoding that some tested version has; which of them serve a model is
for the server to say."""

LAST_PORT = 65535

_SECONDS = ("start_timeout_s", "timeout_s", "update_timeout_s", "silent_s", "connect_s")

_ON_CPU = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
}
"""What there is without a GPU, unless flags say otherwise."""


def devices(config: Any) -> int:
    """GPUs of one server; ranks of attention's data parallelism share those of the tensors."""
    pipeline = int(config.flags.get("pp_size", 1) or 1)
    return int(config.tp) * pipeline * (1 if config.dp_attention else config.dp)


def flag_faults(config: Any) -> list[str]:
    """Keys that cannot be used together, or at all."""
    faults = []
    for name in config.flags:
        plain = name.replace("-", "_").lstrip("_")
        if plain in OURS:
            where = "see `miles plugins show engine sglang`"
            faults.append(f"flags: {name} follows from other keys; {where}")
        if plain.startswith("speculative_"):
            faults.append(f"flags: {name} belongs under engine.speculative, as {plain[12:]}")
    for name in ("workers", "tp", "dp", "connections", "stream_interval", "together"):
        if getattr(config, name) < 1:
            faults.append(f"{name}: {getattr(config, name)} is less than 1")
    for name in ("max_running", "max_len", "first_gpu"):
        if getattr(config, name) < 0:
            faults.append(f"{name}: {getattr(config, name)} is less than 0")
    for name in _SECONDS:
        if not getattr(config, name) > 0:
            faults.append(f"{name} is {getattr(config, name)}; it must be above 0")
    if not 0 <= config.port <= LAST_PORT:
        faults.append(f"port: {config.port} is not from 0 (takes free ones) to {LAST_PORT}")
    if not 0 <= config.memory_fraction < 1:
        faults.append(f"memory_fraction: {config.memory_fraction} is not from 0 to below 1")
    if config.dp_attention and config.tp % config.dp:
        faults.append(f"dp ({config.dp}) must divide tp ({config.tp}) where dp_attention is true")
    if config.dp_attention and config.dp < 2:
        faults.append(f"dp_attention: dp is {config.dp}; it takes at least 2 ranks")
    if config.speculative and not config.speculative.get("algorithm"):
        known = ", ".join(sorted(DRAFTING))
        faults.append(f"speculative.algorithm is not set; SGLang has {known}")
    drafts = config.speculative.get("draft_model_path")
    if drafts and str(config.speculative.get("algorithm")) != "NGRAM":
        faults.append(
            f"speculative.draft_model_path ({drafts}): SGLang reads every update into the draft as "
            "well; only drafts inside the checkpoint (NEXTN, EAGLE without a path) follow a policy "
            "that is trained"
        )
    if config.prefill_url and not config.url:
        faults.append("prefill_url: it goes with engine.url, the servers that decode")
    return faults


def flags(config: Any, **given: Any) -> dict[str, Any]:
    """Every flag of a server by its name with underscores. `given` are those that a run decides:
    `model_path`, `dtype`, `logits`, `port`, `slot`, `seed`, `experts`, `memory_saver`, `in_place`,
    and `shown`: how many GPUs its worker sees, None for all of the machine."""
    slot = int(given["slot"])
    made: dict[str, Any] = {
        "model_path": given["model_path"],
        "host": "127.0.0.1",
        "port": given["port"],
        "device": config.device,
        "load_format": "dummy",  # the first publish brings the weights
        "dtype": given["dtype"] or None,
        "enable_fp32_lm_head": given["logits"] == "float32" != given["dtype"],
        "tp_size": config.tp,
        "skip_tokenizer_init": config.skip_tokenizer,
        "mem_fraction_static": config.memory_fraction or None,
        "max_running_requests": config.max_running or None,
        "context_length": config.max_len or None,
        "enable_deterministic_inference": config.deterministic,
        "enable_return_routed_experts": given["experts"],
        "enable_memory_saver": given["memory_saver"],
        "random_seed": given["seed"],
        # else every part of a stream repeats all tokens before it, and a reader falls behind
        "incremental_streaming_output": True,
    }
    if config.dp > 1:
        made |= {"dp_size": config.dp, "enable_dp_attention": config.dp_attention}
    if config.device != "cpu":
        reserved = given["shown"] == devices(config)  # by a runtime, or there are no others
        made["base_gpu_id"] = 0 if reserved else config.first_gpu + slot * devices(config)
    if config.device == "cpu":
        made |= dict(_ON_CPU)
    if given["in_place"]:
        # else a forward under the old weights may still be uncounted when a publish pauses
        made["disable_overlap_schedule"] = True
    made |= {f"speculative_{name}": value for name, value in config.speculative.items()}
    own = {name.replace("-", "_").lstrip("_"): value for name, value in config.flags.items()}
    # 0 is a value, as of a seed
    return {k: v for k, v in {**made, **own}.items() if v is not None and v is not False}


def arguments(python: str, chosen: Mapping[str, Any]) -> list[str]:
    """The command line. Raises `ConfigError` for a value that is no plain one."""
    words = [python, "-m", "sglang.launch_server"]
    for name, value in chosen.items():
        words.append(f"--{name.replace('_', '-')}")
        if value is True:
            continue
        if isinstance(value, list | tuple):
            words += [str(one) for one in value]
        elif isinstance(value, str | int | float):
            words.append(str(value))
        else:
            raise ConfigError(f"engine sglang: flags.{name} is {value!r}, not a plain value")
    return words
