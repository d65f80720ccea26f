"""A headless Chromium, driven over its DevTools protocol: what pages show, and where."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from tornado.websocket import WebSocketClientConnection, websocket_connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")
_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0")
_PATIENCE_S = 20.0

# Bokeh draws below shadow roots, which neither `innerText` nor a dump of the page looks into.
_TEXT = """(function text(node) {
  let found = node.nodeType === 3 ? node.data + " " : "";
  if (node.shadowRoot) found += text(node.shadowRoot);
  for (const child of node.childNodes) if (child.nodeName !== "SCRIPT") found += text(child);
  return found;
})(document.body)"""
# Texts wider than their boxes, and texts beyond the window where no box around them scrolls.
_CUT_OFF = """(() => {
  const found = []
  const look = (node, scrolls) => {
    for (const child of [...(node.shadowRoot?.children ?? []), ...node.children]) {
      const style = getComputedStyle(child)
      const text = [...child.childNodes].filter(n => n.nodeType === 3).map(n => n.data.trim()).join(" ").trim()
      const is_shown = text && child.offsetWidth > 0 && style.visibility !== "hidden"
      if (is_shown && style.overflowX !== "visible" && child.scrollWidth > child.clientWidth + 1) found.push(text)
      if (is_shown && !scrolls && child.getBoundingClientRect().right > innerWidth + 1) found.push("beyond: " + text)
      // the heads of a table follow its rows
      const follows = child.classList.contains("slick-header")
      look(child, scrolls || follows || ["auto", "scroll"].includes(style.overflowX))
    }
  }
  look(document.body, false)
  return found
})()"""


class Browser:
    """One tab. A context manager. `profile`: a folder of its own."""

    def __init__(self, profile: Path) -> None:
        self._profile = profile
        self._loop = asyncio.new_event_loop()
        self._number = 0

    def __enter__(self) -> Self:
        command = [str(CHROMIUM), *_OPTIONS, f"--user-data-dir={self._profile}", "about:blank"]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        listening = next(line for line in self._process.stderr if "DevTools listening on" in line)
        host = listening.split("ws://")[1].split("/")[0]
        with urllib.request.urlopen(f"http://{host}/json", timeout=_PATIENCE_S) as answer:
            page = next(target for target in json.load(answer) if target["type"] == "page")
        self._connection = self._loop.run_until_complete(self._connect(page["webSocketDebuggerUrl"]))
        return self

    async def _connect(self, url: str) -> WebSocketClientConnection:
        return await websocket_connect(url, max_message_size=1 << 28)

    def __exit__(self, *error: object) -> None:
        self._loop.run_until_complete(self._ended())
        self._process.kill()
        self._process.communicate()
        self._loop.close()

    async def _ended(self) -> None:
        self._connection.close()
        while await self._connection.read_message() is not None:
            pass

    def open(self, url: str) -> None:
        """Show a page in a light window of 1400 pixels."""
        self.change(1400)
        # Else an evaluation just after may still see the page before.
        self.evaluate("window.isBefore = true")
        self._call("Page.navigate", url=url)
        self.until(lambda: self.evaluate("!window.isBefore && document.readyState === 'complete'"))

    def change(self, width: int, *, dark: bool = False) -> None:
        """Change the window: its width in pixels, and whether it prefers dark pages."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._width = width
        self._resize(width, 1000)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page, as JSON has it."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def text(self, until: str = "") -> str:
        """All text of the page, asked again until it contains `until`."""
        self.until(lambda: until in self.evaluate(_TEXT))
        return str(self.evaluate(_TEXT))

    def cut_off(self) -> list[str]:
        """Texts that the window does not show whole; asked again for a while, since pages follow a change of width."""
        self.until(lambda: not self.evaluate(_CUT_OFF))
        return self.evaluate(_CUT_OFF)  # type: ignore[no-any-return]

    def until(self, is_so: Callable[[], Any]) -> None:
        """Wait for a condition. One that does not come true is left to what the test asserts."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while not is_so() and time.monotonic() < deadline_s:
            time.sleep(0.05)

    def picture(self) -> bytes:
        """The whole page as PNG."""
        self._resize(self._width, self.evaluate("document.documentElement.scrollHeight"))
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])

    def _resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)

    def pixels(self) -> np.ndarray[Any, Any]:
        """The whole page, [height, width, 3], 0 to 255."""
        from matplotlib.image import imread

        return np.rint(255 * imread(io.BytesIO(self.picture()), format="png")[:, :, :3])  # type: ignore[no-any-return]

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._loop.run_until_complete(self._answer(method, parameters))

    async def _answer(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        await self._connection.write_message(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while (text := await self._connection.read_message()) is not None:
            message = json.loads(text)
            if message.get("id") == self._number:
                assert "result" in message, message
                return message["result"]  # type: ignore[no-any-return]
        raise AssertionError("the browser has ended")
