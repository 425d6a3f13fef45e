"""What git says, where there is git."""

from __future__ import annotations

import subprocess


def git(*arguments: str) -> str | None:
    """The output of a git command; None without git, outside of a repository, or if it fails."""
    try:
        done = subprocess.run(("git", *arguments), capture_output=True, text=True, check=False)
    except (FileNotFoundError, PermissionError, UnicodeDecodeError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
