"""A headless Chromium, driven over its DevTools protocol: what a page shows after some seconds of real time."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

from tornado.websocket import WebSocketClientConnection, websocket_connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

# Bokeh draws below shadow roots, which neither `innerText` nor a dump of the page looks into.
_TEXT = """(function text(node) {
  let found = node.nodeType === 3 ? node.data + " " : "";
  if (node.shadowRoot) found += text(node.shadowRoot);
  for (const child of node.childNodes) found += text(child);
  return found;
})(document.body)"""


def shown_text(url: str, profile: Path, until: str, timeout_s: float = 60) -> str:
    """All text of the page at `url`, asked again until it contains `until` or the time is over."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    browser = subprocess.Popen(
        [*command, f"--user-data-dir={profile}", "about:blank"], stderr=subprocess.PIPE, text=True
    )
    assert browser.stderr is not None
    try:
        listening = next(line for line in browser.stderr if "DevTools listening on" in line)
        host = listening.split("ws://")[1].split("/")[0]
        return asyncio.run(_read(host, url, until, timeout_s))
    finally:
        browser.kill()
        browser.communicate()


async def _read(host: str, url: str, until: str, timeout_s: float) -> str:
    with urllib.request.urlopen(f"http://{host}/json", timeout=timeout_s) as answer:
        page = next(target for target in json.load(answer) if target["type"] == "page")
    connection = await websocket_connect(page["webSocketDebuggerUrl"])
    await _call(connection, 1, "Page.navigate", url=url)
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    text = ""
    while until not in text and asyncio.get_running_loop().time() < deadline_s:
        await asyncio.sleep(0.2)
        text = (await _call(connection, 2, "Runtime.evaluate", expression=_TEXT))["result"].get("value", "")
    connection.close()
    while await connection.read_message() is not None:
        pass
    return text


async def _call(connection: WebSocketClientConnection, number: int, method: str, **parameters: Any) -> dict[str, Any]:
    await connection.write_message(json.dumps({"id": number, "method": method, "params": parameters}))
    while True:
        message = json.loads(await connection.read_message() or "{}")
        if message.get("id") == number:
            return message["result"]  # type: ignore[no-any-return]
