"""The two worker halves of the `disk` transport: write a snapshot, load a snapshot.

They meet only through the directory whose name the driver carries. A snapshot is what a Hugging
Face checkpoint is, and `snapshot.json` besides, which is written last.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from miles import Context, Engine, Trainer, WeightSyncError
from miles.learn.digest import Whole, contents, dtype_name, hexadecimal, sums
from miles_plugins.transport.serving import Serving

__all__ = [
    "MANIFEST",
    "SnapshotReceiver",
    "SnapshotSender",
    "Writer",
    "one_thread",
    "own_folder",
    "read_manifest",
    "tensors",
]

_log = logging.getLogger(__name__)
MANIFEST = "snapshot.json"
INDEX = "model.safetensors.index.json"
UNFINISHED = ".unfinished-"
_MARK = "weights.id"


def own_folder(shared: str, context: Context) -> Path:
    """Where a run's snapshots lie: `weights` in its directory, or in a directory that others may
    use as well a folder that is its alone, and its again when it is resumed. Raises
    `WeightSyncError`."""
    run = Path(context.directory).absolute()
    if not shared:
        return run / "weights"
    place = Path(shared).absolute()
    if context.rank:
        return place  # only rank 0 writes
    mark = run / _MARK  # a path alone does not tell runs of two machines apart
    with naming(mark):
        if not mark.exists():
            run.mkdir(parents=True, exist_ok=True)
            mark.write_text(secrets.token_hex(6), encoding="utf-8")
        return place / f"{run.name}-{mark.read_text(encoding='utf-8')}"


class SnapshotSender:
    """Half of the transport in a trainer worker. Every rank takes part in the export; rank 0
    writes."""

    def __init__(
        self,
        trainer: Trainer,
        *,
        rank: int,
        directory: Path,
        file_bytes: int,
        model: Any,
        name: str = "version_",
    ) -> None:
        self._trainer = trainer
        self._writes = rank == 0
        self._directory = directory
        self._file_bytes = file_bytes
        self._model = model
        self._name = name  # before the version
        self._new: Path | None = None  # written, and not known to be served everywhere
        self._kept: Path | None = None  # served by every engine

    def write(self, version: int) -> dict[str, Any]:
        """Write a snapshot of the weights as `version`: `directory`, `digest`, `bytes`. Only rank
        0's answer says anything. Raises `WeightSyncError` naming what could not be written, when
        the disk is full for one; nothing of it is then left."""
        if not self._writes:
            for _ in self._trainer.export():  # gathering takes every rank
                pass
            return {}
        self._clear()
        writer = Writer(self._directory, file_bytes=self._file_bytes, name=self._name)
        stream = self._trainer.export()
        try:
            with writer:
                for name, tensor in stream:
                    self.written(name, writer.add(name, tensor))
                self._new = writer.finish(version, self._config(writer.entries))
        except WeightSyncError:
            for _ in stream:  # the other ranks gather to the end, and wait for this one
                pass
            raise
        return {"directory": str(self._new), "digest": writer.digest, "bytes": writer.bytes}

    def written(self, name: str, here: torch.Tensor) -> None:
        """A tensor, on the CPU, is in the snapshot."""

    def keep(self, directory: str) -> None:
        """Every engine serves this snapshot: delete those before it."""
        if self._writes:
            self._kept, self._new = Path(directory), None
            self._clear()

    def give_up(self) -> None:
        """The new snapshot is not served everywhere: delete it. (An engine that is still reading it
        fails to load.)"""
        if self._writes:
            self._new = None
            self._clear()

    def _clear(self) -> None:
        """Delete snapshots, finished and unfinished, but for the one that is served; whatever is
        called otherwise is somebody else's."""
        if not self._directory.is_dir():
            return
        finished = rf"{self._name}\d{{6,}}\.[0-9a-f]{{6}}"
        ours = re.compile(rf"({UNFINISHED})?{finished}|{UNFINISHED}{self._name}[0-9a-f]{{12}}")
        for path in self._directory.iterdir():
            if ours.fullmatch(path.name) and path not in (self._kept, self._new):
                shutil.rmtree(path, ignore_errors=True)

    def _config(self, entries: list[dict[str, Any]]) -> Mapping[str, Any] | None:
        if self._model is None:
            return None
        config = {k: v for k, v in self._model.hf_config().items() if k != "torch_dtype"}
        types = {entry["dtype"] for entry in entries}
        floats = [t for t in ("float32", "bfloat16", "float16") if t in types]
        return config | ({"dtype": floats[0]} if floats else {})


class Writer:
    """A snapshot being written: files by a thread, one of them while the next is gathered.

    Used as a context manager, it leaves nothing behind unless `finish` was reached.
    """

    def __init__(self, directory: Path, *, file_bytes: int, name: str = "version_") -> None:
        self._final = directory
        self._name = name
        self._file_bytes = file_bytes
        self._folder = directory / f"{UNFINISHED}{name}{secrets.token_hex(6)}"
        self._held: dict[str, torch.Tensor] = {}
        self._room = file_bytes
        self._files = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._writing: Future[None] | None = None
        self.entries: list[dict[str, Any]] = []
        """`name`, `dtype`, `shape`, `bytes`, `content`, `file` of each tensor, in order."""
        self.bytes = 0
        self.digest = ""
        """Of the whole stream, once it is finished."""

    def __enter__(self) -> Writer:
        with naming(self._folder):
            self._folder.mkdir(parents=True)
        return self

    def __exit__(self, *fault: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._folder.exists():
            shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Take one more tensor; the copy that was made of it. Raises `WeightSyncError` when an
        earlier file failed."""
        if self._held and tensor.nbytes > self._room:
            self._flush()
        content = contents([tensor])[0]
        here = tensor.detach().to("cpu", copy=True).contiguous()  # it may be the live one
        self._held[name] = here
        self._room -= here.nbytes
        self.bytes += here.nbytes
        entry = {"name": name, "dtype": dtype_name(here), "shape": list(here.shape)}
        entry |= {"bytes": here.nbytes, "content": content, "file": self._file()}
        self.entries.append(entry)
        return here

    def finish(self, version: int, config: Mapping[str, Any] | None) -> Path:
        """Write what is left and the manifest, flush all of it, and give the snapshot its name."""
        self._flush()
        self._wait()
        whole = Whole()
        for e in self.entries:
            whole.add(e["name"], e["dtype"], e["shape"], e["content"])
        self.digest = whole.end()
        files = {entry["name"]: entry["file"] for entry in self.entries}
        if config is not None:
            write_json(self._folder / "config.json", config)
        write_json(
            self._folder / INDEX, {"metadata": {"total_size": self.bytes}, "weight_map": files}
        )
        manifest = {"version": version, "digest": self.digest, "tensors": self.entries}
        write_json(self._folder / MANIFEST, manifest)
        final = self._final / f"{self._name}{version:06d}.{secrets.token_hex(3)}"
        with naming(final):
            flush_folder(self._folder)
            self._folder.rename(final)
            flush_folder(self._final)
        return final

    def _file(self) -> str:
        return f"model-{self._files + 1:05d}.safetensors"

    def _flush(self) -> None:
        self._wait()
        if not self._held:
            return
        path, ready = self._folder / self._file(), self._held
        self._held, self._room = {}, self._file_bytes
        self._files += 1
        self._writing = self._thread.submit(_write_tensors, path, ready)

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


class SnapshotReceiver:
    """Half of the transport in an engine worker."""

    def __init__(self, engine: Engine) -> None:
        self._serving = Serving(engine, "disk")

    def look(self, directory: str, digest: str) -> None:
        """Refuse a snapshot that is incomplete, or whose names, types and shapes are not those that
        the trainer wrote. Raises `WeightSyncError`; nothing has changed then."""
        folder = Path(directory)
        manifest = read_manifest(folder)
        if manifest["digest"] != digest:
            raise WeightSyncError(
                f"transport disk: {folder} has digest {manifest['digest']}, {digest} was written"
            )
        check_headers(folder, manifest["tensors"])

    async def load(self, version: int, directory: str, compare: bool) -> None:
        """Serve the snapshot as `version`; with `compare`, its contents are compared first, and
        what the engine then serves, before it goes on. Raises `WeightSyncError` naming the tensors
        that differ."""
        folder = Path(directory)
        entries = (await asyncio.to_thread(read_manifest, folder))["tensors"]
        if compare:
            await asyncio.to_thread(check_contents, folder, entries)
            _log.info("transport disk: version %d: the snapshot's contents are as sent", version)
        await self._serving.load_directory(
            version, folder, entries, tensors=lambda: tensors(folder, entries), compare=compare
        )


def check_headers(folder: Path, entries: list[dict[str, Any]]) -> None:
    """Raises `WeightSyncError` unless the files have exactly these names, types and shapes."""
    found: dict[str, tuple[str, list[int]]] = {}
    for file in sorted({entry["file"] for entry in entries}):
        with _reading(folder / file) as held:
            for name in held.keys():  # noqa: SIM118 - not a mapping
                part = held.get_slice(name)
                found[name] = (part.get_dtype(), part.get_shape())
    faults = [f"{name} is extra" for name in found if name not in {e["name"] for e in entries}]
    for entry in entries:
        kind, shape = found.get(entry["name"], ("", []))
        if not kind:
            faults.append(f"{entry['name']} is missing")
        elif shape != entry["shape"] or kind != _SHORT.get(entry["dtype"], kind):
            wanted = f"{entry['dtype']} {entry['shape']}"
            faults.append(f"{entry['name']} is {kind} {shape}, not {wanted}")
    if faults:
        more = f" and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise WeightSyncError(f"transport disk: {folder}: {'; '.join(faults[:8])}{more}")


def check_contents(folder: Path, entries: list[dict[str, Any]]) -> None:
    """Raises `WeightSyncError` naming the tensors whose bytes are not those that were sent."""
    with one_thread():
        found = hexadecimal(sums(tensor for _, tensor in tensors(folder, entries)))
    pairs = zip(entries, found, strict=True)
    differ = [entry["name"] for entry, content in pairs if content != entry["content"]]
    if differ:
        raise WeightSyncError(
            f"transport disk: {len(differ)} tensors in {folder} differ from what the trainer sent: "
            f"{', '.join(differ[:8])}"
        )


_one_at_a_time = threading.Lock()  # a second would find 1, and leave it so for the whole process


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """The calling thread computes by itself: torch's threads spin while they wait for each other,
    for seconds where a server beside them occupies the cores."""
    with _one_at_a_time:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)


_SHORT = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
"""What safetensors calls types."""


def tensors(folder: Path, entries: list[dict[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of a snapshot in the order in which the trainer exported them."""
    with contextlib.ExitStack() as stack:
        files: dict[str, Any] = {}
        for entry in entries:
            file = entry["file"]
            if file not in files:
                files[file] = stack.enter_context(_reading(folder / file))
            try:
                yield entry["name"], files[file].get_tensor(entry["name"])
            except SafetensorError as error:
                raise WeightSyncError(
                    f"transport disk: cannot read {entry['name']} in {folder / file}: {error}"
                ) from error


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `snapshot.json` says. Raises `WeightSyncError` when there is none or it is damaged."""
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found | {key: found[key] for key in ("version", "digest", "tensors")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightSyncError(
            f"transport disk: {path} cannot be read, so the snapshot is not complete: {error}"
        ) from error


def config_of(folder: Path) -> Mapping[str, Any] | None:
    """The model's configuration beside a snapshot, where there is one."""
    path = folder / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def write_json(path: Path, data: Any) -> None:
    """Write and flush a file. Raises `WeightSyncError` naming it."""
    with naming(path), path.open("w", encoding="utf-8") as file:
        json.dump(data, file)
        file.flush()
        os.fsync(file.fileno())


def _write_tensors(path: Path, held: Mapping[str, torch.Tensor]) -> None:
    with naming(path):
        save_file(dict(held), path, metadata={"format": "pt"})
        with path.open("rb") as file:
            os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """Flush a directory's names to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(f"transport disk: cannot write {path}: {error}") from error


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[Any]:
    try:
        held = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(f"transport disk: cannot read {path}: {error}") from error
    with held as file:
        yield file
