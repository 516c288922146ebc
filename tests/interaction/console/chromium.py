"""Chromium and its driver, installed, or unpacked from Debian's packages without root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from selenium import webdriver
from selenium.common.exceptions import WebDriverException

from perf.peers.debian import program, unpack
from perf.peers.maven import CACHE
from perf.peers.peer import Unavailable

PACKAGES = ["chromium", "chromium-driver"]
WIDE, PHONE = (1280, 860), (390, 844)
APT_SECONDS = 120


def _missing() -> list[str]:
    """The packages and their missing dependencies. Raises Unavailable."""
    command = ["apt-get", "--simulate", "--no-install-recommends", "install", *PACKAGES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=APT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"apt-get: {error}") from None
    words = [line.split() for line in done.stdout.splitlines() if line.startswith("Inst ")]
    found = [line[1] for line in words]
    if done.returncode or not set(PACKAGES) <= set(found):
        raise Unavailable(f"apt-get knows no {' and '.join(PACKAGES)}: {done.stderr.strip()[:200]}")
    return [*PACKAGES, *sorted(set(found) - set(PACKAGES))]


def _root(may_fetch: bool) -> Path:
    """The directory in which they are unpacked. Raises Unavailable. apt needs two CPU seconds to
    resolve dependencies, and the packages have a hundred megabytes: the quick tier only uses what
    an earlier run has unpacked.
    """
    for complete in sorted(CACHE.glob(f"{PACKAGES[0]}-*/complete")):
        return complete.parent
    if not may_fetch:
        raise Unavailable("it is neither installed nor unpacked; the slow tier unpacks it")
    return unpack(_missing())


def find(may_fetch: bool = True) -> tuple[str, str, dict[str, str]]:
    """Browser, driver and their environment. Skips the test where they are not available."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser and driver:
        return browser, driver, {}
    try:
        root = _root(may_fetch)
        binary, driver = program(root, "usr/lib/chromium/chromium"), program(root, "usr/bin/chromedriver")
    except Unavailable as error:
        pytest.skip(f"chromium: {error}; apt-get install chromium chromium-driver")
    libraries = sorted({str(path.parent) for path in (root / "usr/lib").rglob("*.so*") if "chromium" not in path.parts})
    return binary, driver, {"LD_LIBRARY_PATH": ":".join([*libraries, str(root / "lib")])}


@contextlib.contextmanager
def opened(size: tuple[int, int] = WIDE, is_dark: bool = False, may_fetch: bool = True) -> Iterator[Any]:
    """A window of the browser, closed at the end."""
    binary, driver, environment = find(may_fetch)
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
                     f"--window-size={size[0]},{size[1]}"):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with mock.patch.dict(os.environ, environment):
        try:
            window = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        except WebDriverException as error:
            pytest.skip(f"chromium does not start here: {str(error).splitlines()[0]}")
    try:
        resize(window, size, is_dark)
        yield window
    finally:
        window.quit()


def resize(window: Any, size: tuple[int, int], is_dark: bool = False) -> None:
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
    window.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = {
        "prefers-color-scheme": "dark" if is_dark else "light",
        "prefers-reduced-motion": "reduce",  # colours are measured without waiting for a transition
    }
    emulated = [{"name": name, "value": value} for name, value in features.items()]
    window.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": emulated})


# Problems of the page for a reader: text below WCAG AA, a field without a label, a button without a
# name, text broken into single characters, a cut-off example, a box out of line, content wider than
# the window.
LOOK = """
function parts(text) { return text.match(/[\\d.]+/g).map(Number); }
function light(color) {
  const [r, g, b] = color.slice(0, 3).map((c) => { c /= 255; return c <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4; });
  return .2126 * r + .7152 * g + .0722 * b;
}
function ground(element) {
  for (; element; element = element.parentElement) {
    const color = parts(getComputedStyle(element).backgroundColor);
    if (color.length < 4 || color[3] > .99) return color;
  }
  return parts(getComputedStyle(document.documentElement).backgroundColor);
}
const wrong = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
  if (!text || !element.checkVisibility()) continue;
  const style = getComputedStyle(element), size = parseFloat(style.fontSize);
  const [one, two] = [light(parts(style.color)), light(ground(element))];
  const ratio = (Math.max(one, two) + .05) / (Math.min(one, two) + .05);
  const least = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
  if (ratio < least) wrong.push(`contrast ${ratio.toFixed(2)}: ${text.slice(0, 40)}`);
}
for (const field of document.querySelectorAll("input:not([type=hidden]), select, textarea"))
  if (!field.labels.length && !field.ariaLabel) wrong.push(`no label: ${field.name}`);
for (const one of document.querySelectorAll("button, a[href]"))
  if (!one.innerText.trim() && !one.ariaLabel && one.checkVisibility()) wrong.push(`no name: ${one.outerHTML.slice(0, 80)}`);
for (const one of document.querySelectorAll("td code"))
  if (one.getClientRects().length > 2 && one.offsetWidth < 100 && one.innerText.length < 60)
    wrong.push(`squeezed: ${one.innerText}`);
for (const one of document.querySelectorAll("pre.value"))
  if (one.innerText.startsWith("000000  ") && getComputedStyle(one).whiteSpace !== "pre")
    wrong.push("lines of a hex dump are broken");
const pen = document.createElement("canvas").getContext("2d");
for (const field of document.querySelectorAll("input[placeholder]")) {
  const style = getComputedStyle(field);
  pen.font = style.font;
  const room = field.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  if (pen.measureText(field.placeholder).width > room) wrong.push(`cut off: ${field.placeholder}`);
}
for (const label of document.querySelectorAll("form.row label.check")) {
  const box = label.getBoundingClientRect();
  const button = label.parentElement.querySelector("button").getBoundingClientRect();
  const away = (box.top + box.bottom - button.top - button.bottom) / 2;
  if (Math.abs(away) > 3 && box.bottom > button.top) wrong.push(`not in line: ${label.innerText} by ${away} px`);
}
if (document.documentElement.scrollWidth > innerWidth)
  wrong.push(`overflow: ${document.documentElement.scrollWidth} of ${innerWidth}`);
return wrong;
"""


def faults(window: Any) -> list[str]:
    """The problems that LOOK finds, and the browser's own errors, such as blocked scripts and
    styles.
    """
    said = [entry["message"] for entry in window.get_log("browser") if "favicon" not in entry["message"]]
    return [*window.execute_script(LOOK), *said]
