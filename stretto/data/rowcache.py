"""What a check of rows found, kept in the run folder: whole, of the very same files, or not used at all."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stretto.data.check import FileState, Refusal, RowCheck, file_state
from stretto.observe.lineage import write_atomically
from stretto.types import Split, StrettoError


@dataclass(frozen=True)
class Kept:
    """A check, and the SHA-256 of each data file."""

    found: RowCheck
    contents: tuple[str, ...]


def load(folder: Path, split: Split, key: str) -> Kept | None:
    """The check under ``key``; None where there is none, where it is damaged, or where an image file has changed since
    or is gone.
    """
    try:
        whole = json.loads(_path(folder, split, key).read_bytes())
        if whole["sha256"] != _digest(whole["body"]) or whole["body"]["key"] != key:
            return None
        body = whole["body"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    files: tuple[FileState, ...] = tuple((path, size, changed) for path, size, changed in body["found"]["files"])
    try:
        if any(file_state(Path(path)) != (path, size, changed) for path, size, changed in files):
            return None
    except StrettoError:
        return None
    found = body["found"] | {
        "usable": tuple(body["found"]["usable"]),
        "refused": tuple(Refusal(**refusal) for refusal in body["found"]["refused"]),
        "files": files,
    }
    return Kept(RowCheck(**found), tuple(body["contents"]))


def store(folder: Path, split: Split, key: str, kept: Kept) -> None:
    """Write the check, and the rows that it left out to ``skipped.jsonl`` in place of those of earlier checks of the
    split. Raises StrettoError where the folder cannot be written to.
    """
    body = {"key": key, "found": asdict(kept.found), "contents": kept.contents}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(_path(folder, split, key), json.dumps({"sha256": _digest(body), "body": body}).encode())
        _store_skipped(folder / "skipped.jsonl", split, kept.found)
    except OSError as error:
        raise StrettoError(f"{folder} cannot be written to ({error}); free space there, then start again") from error


def _store_skipped(path: Path, split: Split, found: RowCheck) -> None:
    others = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["split"] != split:
                    others.append(line)
            except (ValueError, KeyError, TypeError):  # cut short; a new one is on its way
                continue
    mine = [json.dumps({"split": split, **asdict(refusal)}) for refusal in found.refused]
    if mine or path.exists():
        write_atomically(path, "".join(f"{line}\n" for line in (*others, *mine)).encode())


def _path(folder: Path, split: Split, key: str) -> Path:
    return folder / f"{split}-{key[:16]}.json"


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
