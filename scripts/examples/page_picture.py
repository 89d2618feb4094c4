"""The top of a report page as a picture, as far as its forest plot; docs/report-page.png was made so.

    python scripts/examples/page_picture.py REPORT.html PICTURE.png

Needs playwright (in the extra ``dev``) and a Chromium.
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1280, 900

page_path, picture_path = map(Path, sys.argv[1:3])
with sync_playwright() as playwright:
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
    page.goto(page_path.resolve().as_uri())
    page.wait_for_selector("section.changes svg.marks")
    box = page.locator("section.changes").bounding_box()
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": box["y"] + box["height"] + 24}
    page.screenshot(path=picture_path, full_page=True, clip=clip)
    browser.close()
