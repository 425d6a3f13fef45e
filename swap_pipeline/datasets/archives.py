"""Published files of data sets: finding or downloading, checking, and reading them without unpacking or unpickling."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import io
import math
import os
import socket
import sys
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swap_pipeline.errors import SwapError
from swap_pipeline.runtime.environment import project_folder
from swap_pipeline.runtime.job_folder import scratch_root

_DOWNLOAD_TIMEOUT_SECONDS = 30.0


def find_or_download(
    url: str, md5: str, root: str, *, contents_md5: str | None = None, also_in: Path | None = None
) -> Path:
    """The path of a published file: in `data.root`, among earlier downloads, or in `also_in`; else downloads it."""
    path = find(url, root, also_in=also_in)
    if path is not None:
        _check_md5(path, url, md5, contents_md5)
        return path
    downloads = scratch_root() / "downloads"
    _download(url, md5, downloads, root)
    return downloads / url.rpartition("/")[2]


def find(url: str, root: str, *, also_in: Path | None = None) -> Path | None:
    """The path of a published file, if it is here; does not check its contents."""
    # In an experiment's temporary folder, data.root lacks files that git ignores; the project's has them.
    folders = [Path(root), project_folder() / root, scratch_root() / "downloads"]
    paths = [folder / url.rpartition("/")[2] for folder in (folders if also_in is None else [*folders, also_in])]
    return next((path for path in paths if path.is_file()), None)


def _check_md5(path: Path, url: str, md5: str, contents_md5: str | None) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, _md5).hexdigest()
    if found == md5:
        return
    if contents_md5 is not None:
        with contextlib.suppress(SwapError):
            if _md5(_gunzip(path)).hexdigest() == contents_md5:
                return
    raise SwapError(
        f"{path} is not the published file (its md5 is {found} instead of {md5}): "
        f"delete it and it will be downloaded, or replace it by the one from {url}"
    )


def _md5(data: bytes = b"") -> Any:
    return hashlib.md5(data, usedforsecurity=False)


def _gunzip(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise SwapError(f"{path} cannot be unpacked ({error}): delete it and run `dvc repro`") from None


def _download(url: str, md5: str, downloads: Path, root: str) -> None:
    """Download into `downloads`, where the file appears once it is complete and has the right checksum."""
    from torchvision.datasets.utils import download_url

    name = url.rpartition("/")[2]
    partial = downloads / f".{name}.{os.getpid()}.tmp"
    try:
        with _download_manners(url):
            download_url(url, str(downloads), partial.name, md5)
        os.replace(partial, downloads / name)
    except (OSError, RuntimeError, ValueError, http.client.HTTPException) as error:
        # torchvision's message for a wrong checksum
        reason = "the download has the wrong checksum" if "File not found or corrupted" in str(error) else str(error)
        raise SwapError(
            f"{name} cannot be downloaded ({' '.join(reason.split())}): get it from {url} and put it into {root}"
        ) from None
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _download_manners(url: str) -> Iterator[None]:
    """A time limit for silent servers; torchvision's progress bar only in a terminal."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_DOWNLOAD_TIMEOUT_SECONDS)
    print(f"downloading {url}", flush=True)
    try:
        with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        socket.setdefaulttimeout(before)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """An idx file: two zero bytes, a type (8: unsigned byte), the number of dimensions, their sizes, the data."""
    raw = _gunzip(path)
    start = 4 + 4 * raw[3] if len(raw) >= 4 else 0
    sizes = np.frombuffer(raw[4:start], dtype=">u4").tolist() if raw[:3] == b"\0\0\x08" and len(raw) >= start else []
    if not sizes or 0 in sizes or math.prod(sizes) != len(raw) - start:
        raise SwapError(f"{path} is not a complete idx file of bytes: delete it and run `dvc repro`")
    return np.frombuffer(raw, dtype=np.uint8, offset=start).reshape(sizes).copy()


def read_members(path: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Files of a compressed tar, read in one pass; writes nothing."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r|gz") as archive:
            for member in archive:
                if member.name in names and member.isfile():
                    content = archive.extractfile(member)
                    assert content is not None
                    found[member.name] = content.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise SwapError(f"{path} cannot be unpacked ({error}): delete it and run `dvc repro`") from None
    for name in names:
        if name not in found:
            raise SwapError(f"{path} has no {name}: delete it and run `dvc repro`")
    return found
