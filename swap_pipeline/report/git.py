"""Information from git, if there is git."""

from __future__ import annotations

import os
import subprocess


def git(*arguments: str) -> str | None:
    """The output of a git command; None without git, outside of a repository, or if it fails."""
    try:
        done = subprocess.run(("git", *arguments), capture_output=True, text=True, check=False)
    except (FileNotFoundError, PermissionError, UnicodeDecodeError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def refusal() -> str:
    """Why git refuses to use this repository, if it belongs to another user; else empty."""
    try:
        done = subprocess.run(("git", "rev-parse"), capture_output=True, env=os.environ | {"LC_ALL": "C"}, check=False)
    except (FileNotFoundError, PermissionError):
        return ""
    if b"dubious ownership" not in done.stderr:
        return ""
    remedy = '`git config --global --add safe.directory "$PWD"` in its root folder'
    return f"this project belongs to another user, so git refuses to use it: {remedy}"


def changed_files(*arguments: str) -> list[str] | None:
    """Files that differ from the last commit, None if unknown; does not refresh git's index."""
    status = git("--no-optional-locks", "status", "--porcelain", *arguments)
    # The first two characters are a status; `git` strips a leading blank from the output.
    return None if status is None else [line.strip().partition(" ")[2].strip() for line in status.splitlines()]
