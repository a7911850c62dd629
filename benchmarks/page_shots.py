"""Pictures of the page, as a visitor sees it while the sample plays: light, dark, and two streams side by side.

python benchmarks/page_shots.py [--out docs] [--url http://127.0.0.1:8765]

Needs playwright, a Chromium on the path and the extras `serve` and `demo`. Without --url it starts a server of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

LIMIT_MS = 120_000
SHOTS = [("light", "light", False), ("dark", "dark", False), ("compare", "light", True)]
"""Name, colours, whether side by side."""


@contextlib.contextmanager
def served() -> Iterator[str]:
    """A server on a free port; its address."""
    command = [sys.executable, "-m", "zendaya", "serve", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        found = re.search(r"http://\S+", process.stdout.readline())
        if found is None:
            sys.exit("the server did not start: try `zendaya serve` by itself")
        yield found.group()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def play(page: Page, words: int) -> None:
    """The sample, until so many words are written."""
    page.get_by_role("button", name="Sample").click()
    page.locator("#lanes .word").nth(words - 1).wait_for(timeout=LIMIT_MS)


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--url")
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no Chromium on the path: install chromium")
    with contextlib.ExitStack() as stack:
        url = options.url or stack.enter_context(served())
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, scheme, compare in SHOTS:
            page = browser.new_page(viewport={"width": 1280, "height": 1040}, color_scheme=scheme)  # type: ignore[arg-type]
            page.goto(url)
            if compare:
                page.get_by_label("Side by side").check()
                page.locator("#dial-a").fill("0.2")
            play(page, 12 if compare else 9)
            page.locator(".word").nth(5).hover()
            page.wait_for_timeout(300)
            page.screenshot(path=options.out / f"page-{name}.png", full_page=compare)
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
