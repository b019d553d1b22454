"""The report in a real browser: without errors, by keyboard, on a phone, light and dark.

Needs Debian's ``chromium`` and ``chromium-driver``, and the browser extra.
"""

import base64
import json
import re
import shutil
import sys

import pytest

pytest.importorskip("jinja2", reason="the report needs the report extra")
pytest.importorskip("matplotlib", reason="its pictures need the report extra")
pytest.importorskip("selenium", reason="the browser is driven by selenium, of the browser extra")

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from kvoffload.advise.chart import FONT_PIXELS

from .pages import VARIANTS, contrast, fleet_page, hostile_fleet_page, hostile_page, page

BROWSER = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(
        not (BROWSER and DRIVER and sys.platform == "linux"),
        reason="chromium and chromedriver are not installed",
    ),
]

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    texts = {
        "good": page(),
        "short": page(requests=20),
        "hostile": hostile_page(),
        "variants": page(policies=VARIANTS),
        "fleet": fleet_page(),
        "hostile-fleet": hostile_fleet_page(),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def show(browser, pages):
    """Open a report at a width, in a colour scheme."""

    def show(name="good", width=1000, scheme="light"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 640}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get((pages / f"{name}.html").as_uri())
        return browser

    return show


def press(browser, *keys):
    for key in keys:
        browser.switch_to.active_element.send_keys(key)
    return browser.switch_to.active_element


def label(element):
    return element.get_attribute("aria-label") or element.text


@pytest.mark.parametrize("name", ["good", "short", "hostile", "fleet", "hostile-fleet"])
def test_nothing_is_logged_and_nothing_is_fetched(show, name):
    show(name).get_log("performance")  # forget how the browser itself started
    browser = show(name)
    assert browser.get_log("browser") == []
    sent = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requested = {
        event["params"]["request"]["url"].partition(":")[0]
        for event in sent
        if event["method"] == "Network.requestWillBeSent"
    }
    assert requested - {"data"} == {"file"}


@pytest.mark.parametrize("name", ["good", "variants", "fleet"])
@pytest.mark.parametrize("width", [320, 640, 641, 1280])
def test_every_picture_is_loaded_in_the_size_and_scheme_of_the_page(show, name, width):
    """A picture that a browser refuses, or cannot read, has no width of its own."""
    seen = set()
    for scheme in ("light", "dark"):
        found = show(name, width, scheme).execute_script(
            "return Array.from(document.images).map(e => [e.currentSrc, e.naturalWidth, "
            "e.closest('picture').querySelectorAll('source').length])"
        )
        assert len(found) == 1 if name == "fleet" else 3
        for address, pixels, others in found:
            assert address.startswith("data:image/svg+xml;base64,")
            assert pixels > (500 if others == 3 and width > 640 else 100)
            seen.add(address)
    assert len(seen) == 2 * len(found)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["good", "short", "hostile", "fleet", "hostile-fleet"])
@pytest.mark.parametrize("width", [320, 390, 640, 700, 860, 861, 1280])
def test_nothing_scrolls_sideways(show, name, width, scheme):
    browser = show(name, width, scheme)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    wide = browser.execute_script(
        "return Array.from(document.querySelectorAll('main *')).filter(e => "
        "{ const r = e.getBoundingClientRect(); return r.width && r.right > innerWidth + 1; })"
        ".map(e => e.outerHTML)"
    )
    assert wide == []


def test_the_keyboard_reaches_all_from_the_skip_link_to_the_copy_buttons(show):
    browser = show()
    skip = press(browser, Keys.TAB)
    assert skip.text == "Skip to the configuration"
    assert skip.location["y"] >= 0  # it comes into view with the focus
    assert "recommended" in browser.find_element(By.CSS_SELECTOR, "tr.chosen").text
    named = "Details", "What the policies do", "Copy: vLLM, --kv-transfer-config", "Copy: Python"
    for name in named:
        focused = press(browser, Keys.TAB)
        assert label(focused) == name
        style = "return getComputedStyle(arguments[0]).outlineStyle"
        assert browser.execute_script(style, focused) == "solid"
    browser = show()
    press(browser, Keys.TAB, Keys.ENTER)
    assert browser.switch_to.active_element.get_attribute("id") == "configuration"
    assert label(press(browser, Keys.TAB)).startswith("Copy: vLLM")


def test_on_a_phone_what_matters_is_there_on_four_screens_and_text_can_be_read(show):
    browser = show(width=360)
    titles = [th.text for th in browser.find_elements(By.CSS_SELECTOR, "#table thead th")]
    assert [title for title in titles if title] == ["policy", "hit ratio 200 MiB", "tokens saved"]
    scale = browser.execute_script(
        "const chart = document.images[0]; return chart.width / chart.naturalWidth"
    )
    assert scale * FONT_PIXELS * 96 / 72 >= 11  # a picture's points are larger than its pixels
    for width, is_open in ((1000, [True, False]), (390, [False, False])):
        browser = show(width=width)
        parts = browser.find_elements(By.TAG_NAME, "details")
        assert [part.get_attribute("open") is not None for part in parts] == is_open
    assert browser.execute_script("return document.documentElement.scrollHeight") < 4 * 844


@pytest.mark.parametrize("width", [390, 1000])
def test_it_prints_on_three_pages_and_nothing_that_was_open_is_missing(show, width):
    browser = show(width=width)
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
    pages = re.findall(rb"/Type\s*/Page\b", base64.b64decode(printed["data"]))
    assert 1 <= len(pages) <= 3
    part = browser.find_element(By.TAG_NAME, "details")
    assert part.get_attribute("open") is not None


def test_a_copy_button_copies_what_stands_beside_it(show):
    browser = show()
    browser.execute_cdp_cmd(
        "Browser.grantPermissions",
        {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]},
    )
    button = browser.find_element(By.CSS_SELECTOR, ".copy[data-from=vllm]")
    button.click()
    status = browser.find_element(By.ID, "copied")
    WebDriverWait(browser, 10).until(lambda _: status.text == "Copied.")
    pasted = browser.execute_async_script(
        "const done = arguments[arguments.length - 1]; navigator.clipboard.readText().then(done);"
    )
    settings = json.loads(pasted)
    assert settings["kv_connector_extra_config"]["spec_name"] == "KVOffloadTieringSpec"


def channels(color):
    """Return the parts of a computed colour."""
    return [float(part) for part in color[color.index("(") + 1 : -1].split(",")]


def computed(browser, selector, name):
    """Return a computed style of each element."""
    return browser.execute_script(
        "return Array.from(document.querySelectorAll(arguments[0]))"
        ".map(e => getComputedStyle(e)[arguments[1]])",
        selector,
        name,
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_heat_map_has_a_darker_shade_for_more_and_text_that_can_be_read(show, scheme):
    browser = show("fleet", scheme=scheme)
    page_color = channels(*computed(browser, "body", "backgroundColor"))[:3]
    texts = [cell.text for cell in browser.find_elements(By.CSS_SELECTOR, "#table td")]
    colors = (computed(browser, "#table td", name) for name in ("backgroundColor", "color"))
    shades = []
    for text, background, ink in zip(texts, *colors, strict=True):
        *tint, alpha = channels(background)
        mixed = [round(b + alpha * (t - b)) for b, t in zip(page_color, tint, strict=True)]
        assert contrast(mixed, channels(ink)[:3]) >= 4.5
        shades.append((float(text.split()[0]), alpha))
    ordered = [alpha for _, alpha in sorted(shades)]
    assert ordered == sorted(ordered)
    assert len(set(ordered)) > 2
    (enough,) = browser.find_elements(By.CSS_SELECTOR, ".enough")
    assert enough.find_elements(By.TAG_NAME, "b")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_the_page(show, scheme):
    """WCAG 2.1: 4.5 to 1."""
    browser = show(scheme=scheme)
    page_color = channels(*computed(browser, "body", "backgroundColor"))[:3]
    for color in computed(browser, "p, dd, dt, th, td, h1, h2, h3, pre, button", "color"):
        assert contrast(channels(color)[:3], page_color) >= 4.5, color
