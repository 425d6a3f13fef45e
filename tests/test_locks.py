"""Locks: asking changes nothing, and no file other than a lock is ever written."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
from pathlib import Path

import pytest
from conftest import Project

from swap_pipeline.errors import SwapError
from swap_pipeline.runtime.locks import Lock

Content = dict[str, tuple[int, str]]


def content_of(root: Path) -> Content:
    """Every file outside of DVC's own folder: when it was last written, and what is in it."""
    files = [path for path in root.rglob("*") if path.is_file() and not {".dvc", "__pycache__"} & set(path.parts)]
    return {str(path): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files}


@pytest.mark.parametrize("command", [("doctor",), ("clean", "--dry-run"), ("clean", "--dry-run", "--all")])
@pytest.mark.long
def test_doctor_and_a_dry_run_change_nothing_not_even_through_links_named_like_locks(
    finished: Project, tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "precious.txt").write_text("precious")
    folder = next((finished.root / ".swap/phase1").iterdir())
    for name in ("own.lock", "deep/er/launcher.lock"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(tmp_path / "precious.txt")
    (folder / "notes.lock").write_text("not a lock")
    before = content_of(tmp_path)

    finished.run(sys.executable, "-m", "swap_pipeline.cli", *command, check=False)

    assert content_of(tmp_path) == before


@pytest.mark.parametrize("name", ["launcher.lock", "writer.lock"])
def test_a_link_in_the_place_of_a_lock_is_named_and_not_followed(finished: Project, tmp_path: Path, name: str) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("precious")
    lock = next((finished.root / ".swap/phase1").iterdir()) / name
    lock.unlink()
    lock.symlink_to(precious)
    (result,) = lock.parent.glob("result*")
    shutil.rmtree(result)

    stage = finished.stage("phase1")
    clean = finished.run(sys.executable, "-m", "swap_pipeline.cli", "clean", "--all", "--yes", check=False)

    for done in (stage, clean):
        assert done.returncode == 1 and name in done.stderr
        assert done.stderr.startswith("error: ") and done.stderr.endswith("cannot be used as a lock: delete it\n")
    assert precious.read_text() == "precious"


def a_link(lock: Path, precious: Path) -> None:
    lock.symlink_to(precious)


def a_second_name(lock: Path, precious: Path) -> None:
    lock.hardlink_to(precious)


def a_pipe(lock: Path, precious: Path) -> None:
    os.mkfifo(lock)


def a_folder(lock: Path, precious: Path) -> None:
    lock.mkdir()


@pytest.mark.parametrize("put", [a_link, a_second_name, a_pipe, a_folder])
def test_what_is_no_plain_file_is_never_a_lock(tmp_path: Path, put: object) -> None:
    lock, precious = tmp_path / "some.lock", tmp_path / "precious.txt"
    precious.write_text("precious")
    assert callable(put)
    put(lock, precious)

    for ask in (Lock(lock).try_acquire, Lock(lock).is_held):
        with pytest.raises(SwapError, match="is a link or not a regular file"):
            ask()
    assert precious.read_text() == "precious"


def test_asking_whether_a_lock_is_held_neither_makes_it_nor_takes_it(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "some.lock"
    assert not Lock(path).is_held() and not path.parent.exists()

    holder = Lock(path)
    assert holder.try_acquire()
    assert Lock(path).is_held() and Lock(path).holder() == str(os.getpid())
    holder.release()
    assert not Lock(path).is_held()
    assert Lock(path).try_acquire()


def test_who_waits_for_a_lock_leaves_the_name_of_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "some.lock"
    path.write_text("123\n")
    handle = os.open(path, os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)

    assert not Lock(path).try_acquire()

    os.close(handle)
    assert path.read_text() == "123\n"
    path.write_text("\x1b[2J")
    assert Lock(path).holder() == "?"
