"""A headless Chromium, driven over WebDriver; Debian's packages chromium and chromium-driver, skipped without them."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from servers import require

#: A browser that wants nothing of the network by itself, so that what is asked for is the page's wish.
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


class Browser:
    """One tab of a browser of its own; a context manager."""

    def __init__(self) -> None:
        chromium = require(binary="chromium", server="Chromium")
        driver = require(binary="chromedriver", server="Chromium")
        self._home = tempfile.TemporaryDirectory(prefix="monsess-chromium-", ignore_cleanup_errors=True)
        self._driver = subprocess.Popen(
            [driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            assert self._driver.stdout is not None
            port = next(
                found[1] for line in self._driver.stdout if (found := re.search(r"successfully on port (\d+)", line))
            )
            self._url = f"http://127.0.0.1:{port}/session"
            options = {"binary": chromium, "args": [*FLAGS, f"--user-data-dir={self._home.name}"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"performance": "ALL", "browser": "ALL"}}
            self._url += "/" + self._ask("POST", "", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        try:
            self._ask("DELETE", "")
        finally:
            self._end()

    def open(self, url: str) -> None:
        """Load a page, and forget what was asked for before."""
        self.requests()
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a function with the body ``script`` returns in the page."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script: str, seconds: float = 60.0) -> Any:
        """What ``script`` returns as soon as that is true."""
        body = f"const done = arguments[0]; const look = () => {{ const found = (() => {{ {script} }})(); "
        body += "found ? done(found) : setTimeout(look, 50); }; look();"
        self._ask("POST", "/timeouts", {"script": int(seconds * 1000)})
        return self._ask("POST", "/execute/async", {"script": body, "args": []})

    def command(self, name: str, **arguments: Any) -> Any:
        """A command of the DevTools protocol."""
        return self._ask("POST", "/goog/cdp/execute", {"cmd": name, "params": arguments})

    def look(self, width: int, height: int, dark: bool = False, phone: bool = False) -> None:
        """Set the size of the window and what its user prefers."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )
        self.command("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", media="", features=[scheme])

    def picture(self, path: Path) -> Path:
        """Write the whole page as a picture, also what lies below the window."""
        found = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))
        return path

    def paper(self, path: Path) -> Path:
        """Print the page."""
        found = self.command("Page.printToPDF", printBackground=True, preferCSSPageSize=True)
        path.write_bytes(base64.b64decode(found["data"]))
        return path

    def requests(self) -> list[str]:
        """What the page has asked for since the last call."""
        found = [json.loads(entry["message"])["message"] for entry in self._log("performance")]
        return [one["params"]["request"]["url"] for one in found if one["method"] == "Network.requestWillBeSent"]

    def complaints(self) -> list[str]:
        """What the console says since the last call: errors, and what a policy has refused."""
        return [entry["message"] for entry in self._log("browser")]

    def _log(self, kind: str) -> list[dict[str, Any]]:
        return self._ask("POST", "/se/log", {"type": kind})

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if method != "POST" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.read().decode(errors='replace')[:1000]}") from None

    def _end(self) -> None:
        self._driver.terminate()
        self._driver.wait(20)
        assert self._driver.stdout is not None
        self._driver.stdout.close()
        self._home.cleanup()
