"""A headless Chromium, spoken to over its debugging pipe with nothing but the standard library."""

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

# Chromium reads commands from file descriptor 3 and answers on 4, so these become our pipes' ends first.
_START = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for number, end in enumerate(ends, 3):
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])
"""
_FLAGS = (
    "--headless",
    "--no-sandbox",  # so that root may start it
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-pipe",
    "--window-size=1000,900",
)


class Browser:
    """One page of one browser. Every answer is waited for, but never longer than until the deadline."""

    def __init__(self, profile: Path, seconds: float = 300.0) -> None:
        assert CHROMIUM is not None
        self._deadline = time.monotonic() + seconds
        self._number = 0
        self._unread = b""
        self.events: list[dict[str, Any]] = []
        self._session = ""
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = [sys.executable, "-c", _START, str(theirs_in), str(theirs_out)]
        command += [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)

    def __enter__(self) -> Self:
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)
        os.close(self._in)
        os.close(self._out)

    def open(self, path: Path) -> None:
        self.call("Page.navigate", url=path.as_uri())
        while not any(e["method"] == "Page.loadEventFired" for e in self.events):
            self._read()

    def call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, after the next frame is drawn."""
        wrapped = f"new Promise(done => requestAnimationFrame(() => setTimeout(() => done({script}))))"
        answer = self.call("Runtime.evaluate", expression=wrapped, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def until(self, condition: Callable[[], bool]) -> None:
        """A page draws itself anew some frames after it changed its size, on a busy machine many."""
        while not condition():
            assert time.monotonic() < self._deadline, "the page never came to look as it should"

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)

    def complaints(self) -> list[str]:
        """Uncaught errors, and what was written to the console."""
        wanted = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(e["params"]) for e in self.events if e["method"] in wanted]

    def requests(self) -> list[str]:
        return [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            left = self._deadline - time.monotonic()
            if left <= 0 or not select.select([self._in], [], [], left)[0]:
                raise TimeoutError(
                    f"the browser did not answer, last it said {[e['method'] for e in self.events[-5:]]}"
                )
            got = os.read(self._in, 1 << 20)
            if not got:
                raise RuntimeError(f"the browser ended with code {self._process.wait(5)}")
            self._unread += got
        text, self._unread = self._unread.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message
