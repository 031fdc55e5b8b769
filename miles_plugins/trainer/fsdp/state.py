"""A trainer's state on disk: safetensors and JSON, nothing that runs code when read.

`model/` is a Hugging Face directory with the float32 masters; `trainer/` holds one file a rank.
Atomicity and digests belong to the checkpoint around it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from miles import CheckpointError
from miles.learn.convert import Parts
from miles_plugins.trainer.fsdp.ranks import local, whole

if TYPE_CHECKING:
    from miles_plugins.trainer.fsdp.worker import Worker

__all__ = ["load", "save"]

FORMAT = 1
"""Of `trainer/`; a reader refuses others."""
MASTER = "float32"
"""Type of the stored weights: that of the masters, so that a resumed run continues exactly."""
SHARD_BYTES = 5 * 10**9
"""Largest file of a model, unless one tensor is larger."""
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one safetensors file. Raises `CheckpointError` naming it, when the disk is full for
    one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        ready = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        save_file(ready, path, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write one JSON file. Raises `CheckpointError` naming it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read what `write_json` wrote. Raises `CheckpointError` naming the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(
            f"cannot read {path}: it holds a {type(found).__name__}, not an object"
        )
    return found


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Tensors of one file, one at a time, on the CPU. Raises `CheckpointError` naming the file."""
    try:
        with safe_open(path, framework="pt") as held:
            for name in held.keys():  # noqa: SIM118 - not a mapping
                yield name, held.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def write_model(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Iterator[tuple[str, Tensor]],
    sizes: Mapping[str, int],
) -> None:
    """Write `config.json` and the weights, in several files once they pass 5 GB, holding one file's
    at a time.

    `sizes` gives every tensor's bytes, in the order of `tensors`. Raises `CheckpointError` naming
    the file.
    """
    write_json(directory / "config.json", config)
    files, room = [], 0
    for name, size in sizes.items():
        if not files or size > room:
            files.append([])
            room = SHARD_BYTES
        files[-1].append(name)
        room -= size
    if len(files) == 1:
        write_tensors(directory / SINGLE, dict(tensors))
        return
    index = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_tensors(directory / file, {name: next(tensors)[1] for name in names})
        index.update(dict.fromkeys(names, file))
    write_json(
        directory / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}
    )


def read_model(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of what `write_model` wrote."""
    files = [SINGLE]
    if (directory / INDEX).is_file():
        files = sorted(set(read_json(directory / INDEX).get("weight_map", {}).values()))
    for file in files:
        yield from read_tensors(directory / file)


def check_names(
    directory: Path, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    """Compare names and shapes. Raises `CheckpointError` that lists what is missing, extra or of
    another shape."""
    faults = [f"{name} is missing" for name in wanted if name not in found]
    faults += [f"{name} is extra" for name in found if name not in wanted]
    faults += [
        f"{name} has shape {found[name]}, not {shape}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    if faults:
        more = f" and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise CheckpointError(f"weights in {directory} do not fit: {'; '.join(faults[:8])}{more}")


def save(worker: Worker, directory: Path, *, weights_only: bool = False) -> None:
    """Write everything `load` needs: whole weights and counters by rank 0, its own moments and
    random state by each rank; or, with `weights_only`, just the model. Raises `CheckpointError`
    naming the file that could not be written, on every rank when it is one's."""
    named, ranks = worker.masters.named, worker.ranks
    tensors = ((name, whole(master).detach()) for name, master in named.items())
    failure: CheckpointError | None = None
    try:
        if ranks.rank == 0:
            _save_model(worker, directory / "model", tensors)
    except CheckpointError as error:
        failure = error
    for _ in tensors:  # gathering takes every rank, also one that cannot write
        pass
    try:
        if failure is None and not weights_only:
            _save_rest(worker, directory / "trainer")
    except CheckpointError as error:
        failure = error
    told = ranks.tell("" if failure is None else str(failure))
    if failure is not None:
        raise failure
    if faults := [f"rank {rank}: {text}" for rank, text in enumerate(told) if text]:
        raise CheckpointError(f"{directory} is not complete: {'; '.join(faults)}")


def _save_model(worker: Worker, directory: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    config = {k: v for k, v in worker.context.model.hf_config().items() if k != "torch_dtype"}
    shapes = worker.conversion.shapes
    sizes = {
        part: math.prod(shape) * master.element_size()
        for name, master in worker.masters.named.items()
        for part, shape in shapes(name, master.shape).items()
    }
    parts = worker.conversion.stream(tensors, dtype=getattr(torch, MASTER))
    write_model(directory, config | {"dtype": MASTER}, parts, sizes)


def _save_rest(worker: Worker, directory: Path) -> None:
    """Counters by rank 0, and what each rank has for itself."""
    ranks = worker.ranks
    if ranks.rank == 0:
        counters = {
            "format": FORMAT,
            "version": worker.version,
            "stage_step": worker.stage_step,
            "world": ranks.world,
            "reference": worker.reference is not None,
            "loss_scale": worker.scale.state(),
        }
        write_json(directory / "state.json", counters)
    own = {f"optimizer/{name}": t for name, t in worker.masters.moments().items()}
    own |= {f"reference/{name}": t for name, t in (worker.reference or {}).items()}
    own["random/cpu"] = torch.get_rng_state()
    if ranks.device.type == "cuda":
        own["random/cuda"] = torch.cuda.get_rng_state(ranks.device)
    write_tensors(directory / f"rank_{ranks.rank}.safetensors", own)


def load(worker: Worker, directory: Path, *, weights_only: bool) -> None:
    """Read what `save` wrote; nothing changes before names and shapes are known to fit.

    Raises `CheckpointError` naming what is missing, extra, damaged or of another shape, or the
    number of ranks it was written by when that is another.
    """
    masters, ranks = worker.masters, worker.ranks
    where = directory / "trainer"
    counters = read_json(where / "state.json")
    if counters.get("format") != FORMAT:
        raise CheckpointError(
            f"{where / 'state.json'} has format {counters.get('format')!r}, not {FORMAT}"
        )
    own: dict[str, Tensor] = {}
    if not weights_only:
        if counters["world"] != ranks.world:
            error = CheckpointError(
                f"{where} is of {counters['world']} ranks and cannot be read by {ranks.world}"
            )
            error.add_note("its weights alone can be: start a new run from its model directory")
            raise error
        own = dict(read_tensors(where / f"rank_{ranks.rank}.safetensors"))
    parts = Parts(worker.conversion, {n: tuple(m.shape) for n, m in masters.named.items()})
    wanted = {n: tuple(m.shape) for n, m in masters.named.items() if n not in parts.names}
    shapes = {name: tuple(t.shape) for name, t in read_model(directory / "model")}
    check_names(directory / "model", shapes, wanted | parts.shapes)
    masters.set_moments(_part(own, "optimizer/"), str(where))
    for name, tensor in _assembled(read_model(directory / "model"), parts):
        masters.write(name, tensor)
    masters.spread()
    worker.version = int(counters["version"])
    worker.stage_step, worker.reference = 0, None
    worker.scale.set_state({} if weights_only else counters.get("loss_scale", {}))
    if weights_only:
        return
    worker.stage_step = int(counters["stage_step"])
    if counters["reference"]:
        parts = {name: tuple(local(m).shape) for name, m in masters.named.items()}
        reference = _part(own, "reference/")
        check_names(where, {name: tuple(t.shape) for name, t in reference.items()}, parts)
        # A copy: what safetensors made cannot be emptied when the trainer sleeps.
        worker.reference = {n: t.to(ranks.device, copy=True) for n, t in reference.items()}
    torch.set_rng_state(own["random/cpu"])
    if "random/cuda" in own and ranks.device.type == "cuda":
        torch.cuda.set_rng_state(own["random/cuda"], ranks.device)


def _assembled(tensors: Iterator[tuple[str, Tensor]], parts: Parts) -> Iterator[tuple[str, Tensor]]:
    """Weights of the module, each once its last part was read."""
    open_: dict[str, Tensor] = {}
    left = {name: len(names) for name, names in parts.names.items()}
    for name, tensor in tensors:
        if (weight := parts.whole.get(name)) is None:
            yield name, tensor
            continue
        if weight not in open_:
            open_[weight] = torch.empty(parts.wanted[weight], dtype=tensor.dtype)
        parts.put(name, tensor, open_[weight])
        left[weight] -= 1
        if not left[weight]:
            yield weight, open_.pop(weight)


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
