# SPDX-License-Identifier: Apache-2.0
"""Pages in a headless Chromium: they work without a network, at the width of a phone and a desk."""

import shutil

import pytest
from playwright.sync_api import sync_playwright

from wavemare.report import read_run, run_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WIDTHS = (390, 1440)
TIMELINE = ".figure:has(.modebar-btn)"

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(CHROMIUM is None, reason="needs a browser (the Debian package chromium)"),
]


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            # The last ones keep it from asking the network, of which there may be none.
            args=[
                *("--no-sandbox", "--disable-gpu", "--disable-background-networking"),
                *("--disable-component-update", "--disable-sync"),
            ],
        )
        yield browser
        browser.close()


class Opened:
    """A page and all that its browser complained of or asked for."""

    def __init__(self, browser, file, width):
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="light")
        self.page.set_default_timeout(200_000)  # on a machine that does other things as well
        self.complaints = []
        self.requests = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())

    def count(self, selector):
        return int(self.page.locator(selector).count())

    def check_contrast(self):
        text, page, ticks = self.page.evaluate(
            "[getComputedStyle(document.body).color,"
            " getComputedStyle(document.body).backgroundColor,"
            " getComputedStyle(document.querySelector('.xtick text')).fill]"
        )
        assert contrast(text, page) > 7
        assert contrast(ticks, page) > 4.5


@pytest.fixture(scope="module")
def report(tmp_path_factory, sample):
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        sample.write(folder / "one", [{**sample.metrics[0], **sample.sparse}, *sample.metrics[1:]]),
        sample.write(folder / f"two-{'with-a-name-without-an-end-' * 4}"),
    ]
    file = folder / "report.html"
    file.write_text(run_page([read_run(run) for run in runs]))
    return file


@pytest.mark.parametrize("width", WIDTHS)
def test_a_report_is_drawn_without_complaint_or_network(browser, report, width):
    opened = Opened(browser, report, width)
    places = opened.count(".figure")
    assert places >= 12
    # Every figure has its axes and marks with data: lines, points or bars.
    drawn = opened.page.evaluate(
        "[...document.querySelectorAll('.figure')].map(f => [f.querySelectorAll('.xtick').length,"
        " f.querySelectorAll('.scatterlayer .trace path, .barlayer .point path').length])"
    )
    assert len(drawn) == places
    assert all(ticks and marks for ticks, marks in drawn), drawn
    scroll, client = opened.page.evaluate(
        "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert scroll <= client == width
    opened.check_contrast()
    light = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    opened.page.emulate_media(color_scheme="dark")
    opened.page.wait_for_function(
        "light => getComputedStyle(document.body).backgroundColor !== light", arg=light
    )
    opened.check_contrast()
    assert opened.page.evaluate("window.broken") is None
    assert opened.complaints == []
    assert opened.requests == [report.as_uri()]
    opened.page.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_a_timeline_is_zoomed_by_drawing_a_frame(browser, report, width):
    opened = Opened(browser, report, width)
    place = opened.page.locator(TIMELINE).first
    place.scroll_into_view_if_needed()
    span = "e => e.layout.xaxis.range[1] - e.layout.xaxis.range[0]"
    whole = place.evaluate(span)
    box = place.locator(".nsewdrag").first.bounding_box()
    middle = box["y"] + box["height"] / 2
    opened.page.mouse.move(box["x"] + box["width"] * 0.25, middle)
    opened.page.mouse.down()
    opened.page.mouse.move(box["x"] + box["width"] * 0.75, middle, steps=4)
    opened.page.mouse.up()
    shown = f"whole => Math.abs(({span})(document.querySelector('{TIMELINE}')) / whole - 1) < 0.1"
    opened.page.wait_for_function(shown, arg=whole / 2)
    place.locator(".modebar-btn[data-title='Reset axes']").click()
    opened.page.wait_for_function(shown, arg=whole)
    assert opened.page.evaluate("document.documentElement.scrollWidth") == width
    assert opened.complaints == []
    assert opened.requests == [report.as_uri()]
    opened.page.close()


def contrast(one, other):
    """Ratio of two colours' luminances (WCAG 2.1)."""

    def luminance(colour):
        parts = colour.partition("(")[2].rstrip(")").split(",")[:3]
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
            for c in (float(part) / 255 for part in parts)
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
