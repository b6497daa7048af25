"""Files that are complete or absent: written to a temporary path, synced, renamed, and verified by hash when read.

A bundle is a directory of files with a manifest of their sizes and hashes. After a crash at any moment a reader finds
the old content or the new one; temporary paths that a crash leaves behind start with a dot and end in `.tmp`, and
`remove_temporary_files` removes them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from steppe.core.contracts.errors import DamagedFile, DiskFull

MANIFEST = "manifest.json"
FORMAT = 1
_NO_HARD_LINK_ERRORS = (errno.EPERM, errno.EMLINK, errno.EXDEV, errno.ENOTSUP, errno.ENOSYS)
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def write_atomic(path: Path, data: bytes) -> None:
    """Replace the file at `path` with `data`, durably; on failure the old content stays and nothing else is left."""
    aside = _temporary_path(path)
    try:
        _write_synced(aside, data)
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise
    _sync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace a file with indented JSON; NaN and infinity are refused because JSON cannot represent them."""
    write_atomic(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read what `write_json` wrote; DamagedFile when the file is missing or not JSON."""
    try:
        return json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path} is damaged: not valid JSON ({error})") from None


def write_bundle(
    directory: Path, files: Mapping[str, bytes], write_extra: Callable[[Path], Mapping[str, bytes]] | None = None
) -> None:
    """Write a new directory with these files and their manifest; it appears complete or not at all.

    `write_extra` receives the directory at its temporary path, writes and syncs more files there, and returns the files
    that describe how to verify them. Raises FileExistsError when `directory` exists: bundles are immutable.
    """
    wrong = [name for name in files if not PLAIN_NAME.fullmatch(name) or name == MANIFEST]
    if wrong:
        raise ValueError(f"not a plain file name for a bundle: {wrong[0]!r}")
    if directory.exists():
        raise FileExistsError(f"{directory} is already there")
    aside = _temporary_path(directory)
    try:
        os.mkdir(aside)
        files = {**files, **write_extra(aside)} if write_extra is not None else files
        for name, data in files.items():
            _write_synced(aside / name, data)
        _write_synced(aside / MANIFEST, _manifest(files))
        _sync_directory(aside)
        os.rename(aside, directory)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    _sync_directory(directory.parent)


def read_bundle(directory: Path) -> dict[str, bytes]:
    """Read and verify every file in the manifest; DamagedFile says which file is corrupt and how."""
    return {name: _read_verified(directory / name, entry) for name, entry in read_manifest(directory).items()}


def read_file(directory: Path, name: str) -> bytes:
    """Read and verify one file of a bundle."""
    entry = read_manifest(directory).get(name)
    if entry is None:
        raise DamagedFile(f"{directory} holds no {name}")
    return _read_verified(directory / name, entry)


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file under a second name; make a synced copy where the filesystem has no hard links."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_HARD_LINK_ERRORS:
            raise
        shutil.copyfile(source, target)
        with target.open("rb") as copy:
            os.fsync(copy.fileno())


def encode_manifest(entries: dict[str, Any]) -> bytes:
    """Encode the manifest that `read_manifest` accepts.

    The encoding is canonical and includes its own hash, so that every byte is verified.
    """
    digest = hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
    return (
        json.dumps({"format": FORMAT, "sha256": digest, "files": entries}, indent=1, sort_keys=True) + "\n"
    ).encode()


def read_manifest(directory: Path) -> dict[str, dict[str, Any]]:
    """Read the manifest, itself verified: file name → its `size` and `sha256`."""
    path = directory / MANIFEST
    data = _read(path)
    try:
        manifest = json.loads(data)
        version = manifest["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedFile(f"{path} is damaged: it is not a manifest") from None
    if isinstance(version, int) and version > FORMAT:
        raise DamagedFile(f"{path} has format {version}, newer than {FORMAT}, the newest this version of Steppe reads")
    files = manifest.get("files")
    if not isinstance(files, dict) or encode_manifest(files) != data:
        raise DamagedFile(f"{path} is damaged: its checksum does not match")
    wrong = [name for name, entry in files.items() if not (PLAIN_NAME.fullmatch(name) and _is_entry(entry))]
    if wrong:
        raise DamagedFile(f"{path} is damaged: its entry {wrong[0]!r} is not a plain file name with size and sha256")
    return files


@contextlib.contextmanager
def raising_disk_full(path: Path) -> Iterator[None]:
    """Convert an OSError for a full disk or an exhausted quota to DiskFull."""
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise DiskFull(f"there is no disk space to write {path}: {error.strerror}") from error


def is_disk_full(error: OSError) -> bool:
    """Return whether the error means a full disk or an exhausted quota."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def free_bytes(path: Path) -> int | None:
    """Return the free bytes for an unprivileged user on the filesystem of `path`; None if unknown."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def remove_temporary_files(directory: Path) -> None:
    """Remove temporary files that a crash left. Only the single writer of a directory may call this."""
    for left in directory.glob(".*.tmp"):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def _temporary_path(path: Path) -> Path:
    return path.parent / f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp"


def _write_synced(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _manifest(files: Mapping[str, bytes]) -> bytes:
    entries = {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    return encode_manifest(entries)


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("size"), int) and isinstance(entry.get("sha256"), str)


def _read_verified(path: Path, entry: dict[str, Any]) -> bytes:
    data = _read(path)
    if len(data) != entry["size"]:
        word = "truncated" if len(data) < entry["size"] else "too long"
        raise DamagedFile(f"{path} is damaged: {word}, {len(data)} bytes instead of {entry['size']}")
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise DamagedFile(f"{path} is damaged: its {len(data)} bytes do not match their sha256")
    return data


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DamagedFile(f"{path} is missing") from None
    except OSError as error:
        raise DamagedFile(f"{path} cannot be read: {error.strerror}") from None
