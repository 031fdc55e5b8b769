"""The two worker halves of the `disk_delta` transport: write what changed, apply it.

A difference is a directory like a snapshot, with `changes.zst` in the place of tensors: one zstd
frame for each tensor that changed, of its bytes exclusive-or'ed with those before, all first bytes
of its numbers, then all second ones, and so on, since they change differently.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import zstandard

from miles import Engine, WeightSyncError, process_alive, process_identity
from miles.learn.digest import Whole, contents, dtype_name
from miles_plugins.transport import snapshot
from miles_plugins.transport.serving import Serving
from miles_plugins.transport.snapshot import SnapshotSender, Writer, one_thread

__all__ = ["DeltaReceiver", "DeltaSender"]

CHANGES = "changes.zst"


class DeltaSender(SnapshotSender):
    """Half of the transport in a trainer worker. Rank 0 keeps the weights of the last publish in
    the machine's memory, and writes."""

    def __init__(self, trainer: Any, *, level: int, **how: Any) -> None:
        super().__init__(trainer, **how)
        self._level = level
        self._last: dict[str, torch.Tensor] = {}
        self._base = ""  # the digest of `_last`

    def holds(self) -> str:
        """Digest of the weights that a difference would be against; empty when there are none."""
        return self._base

    def write(self, version: int, difference: bool = False) -> dict[str, Any]:
        """Write the weights as `version`, whole or as a `difference`: `directory`, `digest`,
        `bytes` of the weights, `written` of them. Raises as `SnapshotSender.write`."""
        base, self._base = self._base, ""  # until every engine has what is written now
        if not self._writes:
            return super().write(version)
        if not difference or not base:
            answer = self._whole(version)
        else:
            answer = self._difference(version, base)
        self._next = answer["digest"]
        return answer

    def _whole(self, version: int) -> dict[str, Any]:
        self._last = {}
        answer = super().write(version)
        return answer | {"written": answer["bytes"]}

    def written(self, name: str, here: torch.Tensor) -> None:
        """Remember a tensor that a whole snapshot has."""
        self._last[name] = here

    def _difference(self, version: int, base: str) -> dict[str, Any]:
        self._clear()
        stream = self._trainer.export()
        final = self._directory / f"{self._name}{version:06d}.{secrets.token_hex(3)}"
        folder = self._directory / f"{snapshot.UNFINISHED}{final.name}"
        try:
            with snapshot.naming(folder):
                folder.mkdir(parents=True)
            entries = self._changes(folder / CHANGES, stream)
            whole = Whole()
            for e in entries:
                whole.add(e["name"], e["dtype"], e["shape"], e["content"])
            manifest = {"version": version, "digest": whole.end(), "base": base, "tensors": entries}
            manifest["config"] = self._config(entries)
            snapshot.write_json(folder / snapshot.MANIFEST, manifest)
            with snapshot.naming(final):
                snapshot.flush_folder(folder)
                folder.rename(final)
                snapshot.flush_folder(self._directory)
        except WeightSyncError:
            shutil.rmtree(folder, ignore_errors=True)
            for _ in stream:  # the other ranks gather to the end, and wait for this one
                pass
            raise
        self._new = final
        size, written = sum(e["bytes"] for e in entries), sum(e["size"] for e in entries)
        answer = {"directory": str(final), "digest": manifest["digest"]}
        return answer | {"bytes": size, "written": written}

    def _changes(self, path: Path, stream: Iterator[tuple[str, torch.Tensor]]) -> list[dict]:
        entries: list[dict[str, Any]] = []
        compress = zstandard.ZstdCompressor(level=self._level).compress
        seen: set[str] = set()
        with snapshot.naming(path), path.open("wb") as file:
            for name, tensor in stream:
                here = tensor.detach().to("cpu", copy=True).contiguous()
                before = self._last.get(name)
                frame = b""
                if before is None or before.shape != here.shape or before.dtype != here.dtype:
                    raise WeightSyncError(
                        f"transport disk_delta: {name} is no tensor of the last publish, or of "
                        "another type or shape"
                    )
                entry = {"name": name, "dtype": dtype_name(here), "shape": list(here.shape)}
                entry |= {"bytes": here.nbytes, "content": contents([here])[0], "at": file.tell()}
                changed = planes(here) ^ planes(before)
                if bool(changed.any()):
                    frame = compress(changed.numpy())
                    file.write(frame)
                entries.append(entry | {"size": len(frame)})
                self._last[name] = here
                seen.add(name)
            file.flush()
            os.fsync(file.fileno())
        if gone := sorted(self._last.keys() - seen):
            raise WeightSyncError(f"transport disk_delta: {gone[0]} is not exported any more")
        return entries

    def keep(self, directory: str) -> None:
        """Every engine serves this: the next difference is against it."""
        if self._writes:
            self._base = self._next
        super().keep(directory)

    def give_up(self) -> None:
        """Some engine may lack it: the next publish is whole."""
        self._base, self._last = "", {}
        super().give_up()


class DeltaReceiver:
    """Half of the transport in an engine worker, which keeps a whole snapshot."""

    def __init__(self, engine: Engine, *, local: Path, file_bytes: int) -> None:
        self._serving = Serving(engine, "disk_delta")
        self._local = local / f"{process_identity()}-{secrets.token_hex(4)}"
        self._file_bytes = file_bytes
        self._held: Path | None = None  # whole, and served
        self._base = ""  # its digest
        self._new: Path | None = None
        _clear_dead(local)

    def holds(self) -> str:
        """Digest of the snapshot that is held; empty when there is none."""
        return self._base

    def stage(self, directory: str, digest: str) -> None:
        """Make a whole snapshot of a difference, or copy a whole one, and prove every tensor.
        Raises `WeightSyncError`; nothing has changed then."""
        there = Path(directory)
        manifest = snapshot.read_manifest(there)
        entries, base = manifest["tensors"], manifest.get("base", "")
        if manifest["digest"] != digest:
            raise WeightSyncError(
                f"transport disk_delta: {there} has digest {manifest['digest']}, {digest} was "
                "written"
            )
        if base and (self._held is None or base != self._base):
            raise WeightSyncError(
                f"transport disk_delta: {there} is against {base}, and "
                f"{self._base or 'nothing'} is held"
            )
        stream = applied(self._held, there, entries) if base else snapshot.tensors(there, entries)
        with one_thread(), Writer(self._local, file_bytes=self._file_bytes) as writer:
            for name, tensor in stream:
                writer.add(name, tensor)
            differ = [
                want["name"]
                for want, got in zip(entries, writer.entries, strict=True)
                if want["content"] != got["content"]
            ]
            if differ:
                raise WeightSyncError(
                    f"transport disk_delta: {len(differ)} tensors differ from what the trainer "
                    f"sent: {', '.join(differ[:8])}"
                )
            config = manifest.get("config") or snapshot.config_of(there)
            self._new = writer.finish(manifest["version"], config)

    async def load(self, version: int, compare: bool) -> None:
        """Have the engine serve what was staged as `version`. Raises `WeightSyncError`."""
        if self._new is None:
            raise WeightSyncError("transport disk_delta: nothing was staged")
        new = self._new
        manifest = await asyncio.to_thread(snapshot.read_manifest, new)
        entries = manifest["tensors"]
        await self._serving.load_directory(
            version, new, entries, tensors=lambda: snapshot.tensors(new, entries), compare=compare
        )
        self._held, self._base, self._new = new, manifest["digest"], None
        await asyncio.to_thread(self._clear)

    def give_up(self) -> None:
        """Drop what was staged and is not served."""
        self._new = None
        self._clear()

    def _clear(self) -> None:
        for path in self._local.iterdir() if self._local.is_dir() else ():
            if path not in (self._held, self._new):
                shutil.rmtree(path, ignore_errors=True)


def planes(tensor: torch.Tensor) -> torch.Tensor:
    """(bytes,) uint8: all first bytes of a tensor's numbers, then all second ones, and so on."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return flat.view(-1, tensor.element_size()).t().contiguous().reshape(-1)


def _from_planes(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    numbers = flat.view(like.element_size(), -1).t().contiguous().reshape(-1)
    return numbers.view(like.dtype).view(like.shape)


def applied(
    held: Path | None, there: Path, entries: list[dict[str, Any]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of a snapshot with a difference applied to it. Raises `WeightSyncError`."""
    if held is None:
        raise WeightSyncError(f"transport disk_delta: {there} is a difference, against nothing")
    before = snapshot.read_manifest(held)["tensors"]
    expand = zstandard.ZstdDecompressor().decompress
    path = there / CHANGES
    try:
        with path.open("rb") as file:
            olds = snapshot.tensors(held, before)
            for entry, (name, old) in zip(entries, olds, strict=True):
                if name != entry["name"] or list(old.shape) != entry["shape"]:
                    raise WeightSyncError(f"transport disk_delta: {there} has no {name} as held")
                if not entry["size"]:
                    yield name, old
                    continue
                file.seek(entry["at"])
                raw = expand(file.read(entry["size"]), max_output_size=entry["bytes"])
                changed = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
                yield name, _from_planes(planes(old) ^ changed, old)
    except (OSError, ValueError, RuntimeError, zstandard.ZstdError) as error:
        raise WeightSyncError(f"transport disk_delta: cannot read {path}: {error}") from error


def _clear_dead(local: Path) -> None:
    """Delete snapshots of workers of this machine that are gone."""
    for path in local.iterdir() if local.is_dir() else ():
        named = re.fullmatch(r"(.+)-[0-9a-f]{8}", path.name)
        if named is not None and process_alive(named[1]) is False:
            shutil.rmtree(path, ignore_errors=True)
