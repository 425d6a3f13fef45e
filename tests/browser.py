"""A real browser without a window: Debian's chromium, driven through a pipe by its DevTools protocol."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One tab."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._received = b""
        self._count = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.requests: list[str] = []
        """addresses that the page asked for"""
        for domain in ("Page", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            part = os.read(self._back, 1 << 20)
            assert part, "the browser has gone"
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        if answer.get("method") == "Network.requestWillBeSent":
            self.requests.append(answer["params"]["request"]["url"])
        return answer

    def open(self, page: Path, *, width: int, dark: bool) -> None:
        """Load a page as a device of this width and its user's scheme would show it."""
        height = 844 if width < 600 else 900
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.requests.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.evaluate(
            "new Promise(done => document.readyState == 'complete' ? done() : addEventListener('load', done))"
        )
        self.evaluate("Promise.all([...document.images].map(image => image.decode().catch(() => null)))")

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression, or of what it promises."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Started with its profile in `folder`, ended at the end."""
    assert CHROMIUM is not None
    commands, to = os.pipe()
    back, answers = os.pipe()

    def connect() -> None:
        # The browser reads from 3 and writes to 4; whatever has these numbers now must not be lost on the way.
        read, write = os.dup(commands), os.dup(answers)
        os.dup2(read, 3)
        os.dup2(write, 4)

    process = subprocess.Popen(
        [
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",  # tests may run as root, in a container; the page is our own
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
            "about:blank",
        ],
        preexec_fn=connect,
        pass_fds=(3, 4),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=(folder.parent / f"{folder.name}.log").open("wb"),
    )
    os.close(commands)
    os.close(answers)
    try:
        yield Browser(to, back)
    finally:
        os.close(to)
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(back)
