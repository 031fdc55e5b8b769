"""Makes the `transformers` module of a checkpoint or of a made-up configuration; heavy, for trainer
workers.

Never reaches for the network, and never lets a tensor that does not fit pass in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.initialization import no_init_weights

from miles import ConfigError
from miles.learn.convert import Conversion, Parts
from miles_plugins.model.headers import weight_files

__all__ = ["causal_lm"]


def causal_lm(hf_config: Mapping[str, Any], directory: Path | None) -> nn.Module:
    """A float32 causal language model.

    Without a directory the weights are drawn by torch's current random generator, so the caller
    seeds it. With one they are read from its safetensors. Raises `ConfigError` for an unknown class
    or model type, and naming every tensor that is missing, extra or of another shape.
    """
    kind = _model_class(hf_config)
    fields = {k: v for k, v in hf_config.items() if k not in ("dtype", "torch_dtype")}
    config = kind.config_class.from_dict({**fields, "dtype": "float32"})
    if directory is None:
        return kind(config)
    with no_init_weights():
        model = kind(config)
    model.tie_weights()
    _fill(model, weight_files(directory))
    return model


def _model_class(hf_config: Mapping[str, Any]) -> Any:
    names = hf_config.get("architectures") or []
    for name in names:
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    raise ConfigError(
        f"model: architectures {list(names)} of model_type {hf_config.get('model_type')!r} are "
        f"not in transformers {transformers.__version__}"
    )


@torch.no_grad()
def _fill(model: nn.Module, files: list[Path]) -> None:
    targets = model.state_dict(keep_vars=True)
    parts = Parts(Conversion(model), {name: t.shape for name, t in targets.items()})
    tied = _tied(targets)
    seen: set[str] = set()
    faults: list[str] = []
    for path in files:
        try:
            with safe_open(path, framework="pt") as held:
                for name in held.keys():  # noqa: SIM118 - not a mapping
                    if name.endswith("rotary_emb.inv_freq"):
                        continue  # old checkpoints carry it; it follows from the configuration
                    target = targets.get(name)
                    wanted = parts.shapes.get(name) if target is None else tuple(target.shape)
                    if wanted is None:
                        faults.append(f"{name} is extra")
                        continue
                    tensor = held.get_tensor(name)
                    if tuple(tensor.shape) != wanted:
                        faults.append(f"{name} has shape {tuple(tensor.shape)}, not {wanted}")
                    elif target is None:
                        parts.put(name, tensor, targets[parts.whole[name]])
                    elif tied.get(name) in seen and not torch.equal(target, tensor.to(target)):
                        faults.append(f"{name} differs from {tied[name]}, to which it is tied")
                    else:
                        target.copy_(tensor)
                    seen.add(name)
        except SafetensorError as error:
            raise ConfigError(f"model: {path} is damaged: {error}") from error
    covered = seen | {name for name, twin in tied.items() if twin in seen}
    needed = (part for n in targets if n not in covered for part in parts.names.get(n, (n,)))
    faults += [f"{name} is missing" for name in needed if name not in seen]
    if faults:
        more = f" and {len(faults) - 8} more" if len(faults) > 8 else ""
        where = files[0].parent
        raise ConfigError(f"model: weights in {where} do not fit: {'; '.join(faults[:8])}{more}")


def _tied(targets: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Each name that shares memory with another, to that other."""
    by_memory: dict[int, list[str]] = {}
    for name, tensor in targets.items():
        by_memory.setdefault(tensor.data_ptr(), []).append(name)
    twins = [names for names in by_memory.values() if len(names) == 2]
    return {a: b for first, second in twins for a, b in ((first, second), (second, first))}
