"""The page in Chromium, wide and narrow, light and dark: cards, the table, pictures of all kinds, the query."""

from __future__ import annotations

import os

import numpy as np
import pytest
import videos
from rigs.browser import cards, show, until
from shard_rig import get_json, sample, serving, write_set
from test_view_api import damaged
from test_view_browser import nginx, sound

from tarshards import ShardWriter, TarWriter
from tarshards.index.build import build_index
from tarshards.samples.codecs import encode_field
from tarshards.view.static_page import write_static_page

pytestmark = pytest.mark.interop

SCREENS = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]
#: The elements with text of their own, whose colour must differ enough from what is behind them (WCAG: 4.5 to 1).
PALE = """() => {
  const rgba = (text) => (text.match(/[\\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
  const light = (rgb) => rgb.slice(0, 3).map((value) => value / 255)
    .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, at) => sum + value * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (each) => {
    for (; each; each = each.parentElement) {
      const colour = rgba(getComputedStyle(each).backgroundColor);
      if ((colour[3] ?? 1) > 0.5) return colour;
    }
    return [255, 255, 255];
  };
  const hasText = (each) => [...each.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  return [...document.querySelectorAll("body *:not(option, script, :disabled)")]
    .filter((each) => each.checkVisibility() && hasText(each)).map((each) => {
      const [one, other] = [light(rgba(getComputedStyle(each).color)), light(behind(each))].sort((a, b) => b - a);
      return [each.outerHTML.slice(0, 120), (one + 0.05) / (other + 0.05)];
    }).filter(([, contrast]) => contrast < 4.5);
}"""
#: The lines of text in cards that are cut through, or reach beyond their card.
CUT = """[...document.querySelectorAll('.card:not(.row) p')].filter((each) => {
  if (!each.checkVisibility()) return false;
  const [line, card] = [each.getBoundingClientRect(), each.closest('.card').getBoundingClientRect()];
  return line.height % 16 > 0.5 || line.bottom > card.bottom - 6;
}).map((each) => each.closest('.card').textContent)"""


@pytest.fixture(params=SCREENS, ids=[f"{width} {scheme}" for width, scheme in SCREENS])
def screen(page, request):
    """A page as wide and as light as a screen; at the end, all that it shows fits and can be read."""
    width, scheme = request.param
    page.set_viewport_size({"width": width, "height": 844 if width < 500 else 900})
    page.emulate_media(color_scheme=scheme)
    yield page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(PALE) == []
    assert page.evaluate(CUT) == []


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(write_set(tmp_path_factory.mktemp("set"))) as server:
        yield server


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    """Samples with a video and its noisy mask, sounds, and curves."""
    folder = tmp_path_factory.mktemp("media")
    noise = np.random.default_rng(0).integers(0, 2, (32, 48), np.uint8) * 255
    steps = np.linspace(0, 6, 72, dtype=np.float32)
    with ShardWriter(f"{folder}/m-%03d.tar", max_samples=100) as writer:
        for number in range(4):
            video = {"__key__": f"video{number}", "mask.png": noise, "mp4": videos.written(count=40, size=(64, 96))}
            writer.write(video | {"action.npy": np.sin(steps[:, None] * np.arange(1, 8, dtype=np.float32))})
        for number in range(4):
            writer.write({"__key__": f"sound{number}", "wav": sound(1 + number), "txt": "what is said " * 30})
        writer.write({"__key__": "curves", "npy": np.sin(steps)})
    with serving(f"{folder}/m-000.tar") as server:
        yield server


def pixels(selector):
    """Return JavaScript for the number of different colours in a canvas."""
    return f"""(() => {{
      const canvas = document.querySelector("{selector}");
      if (!canvas) return 0;
      const data = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer);
      return new Set(data).size;
    }})()"""


def test_a_large_set_has_cards_for_what_is_in_sight_only(screen, tmp_path):
    jpeg = encode_field("jpg", sample(0)["jpg"])
    with TarWriter(str(tmp_path / "set-0.tar")) as writer:
        for number in range(5000):
            writer.write({"__key__": f"{number:06d}", "jpg": jpeg, "cls": number % 7})
    build_index(str(tmp_path / "set-0.tar")).save(str(tmp_path / "set-0.tar"))
    for shard in range(1, 4):
        for ending in ("", ".index"):
            os.link(tmp_path / f"set-0.tar{ending}", tmp_path / f"set-{shard}.tar{ending}")
    requests = []
    screen.on("request", lambda request: requests.append(request.url))
    with serving(str(tmp_path / "set-{0..3}.tar")) as server:
        screen.goto(server.url)
        cards(screen)
        screen.wait_for_load_state("networkidle")
        assert screen.text_content(".status") == "20,000 samples"
        assert 3 < screen.locator(".card").count() < 50
        assert sum("rows?" in url for url in requests) <= 2
        assert sum("picture?" in url for url in requests) == screen.locator(".card").count()
        assert screen.evaluate("document.querySelector('.scroller').clientHeight < 900")
        screen.keyboard.press("End")
        assert cards(screen)[-1] == "004999"


@pytest.mark.parametrize("view", ["small", "medium", "large"])
def test_cards_have_whole_lines_with_captions_first(screen, server, view):
    screen.goto(f"{server.url}#view={view}")
    cards(screen)
    until(screen, "document.querySelector('.card img')?.naturalWidth > 0")
    lines = screen.eval_on_selector_all(".card[data-position='0'] p", "all => all.map(each => each.textContent)")
    assert lines[0].startswith("txt text 0 <script>")
    if view == "large":
        assert [text.split()[0] for text in lines[1:3]] == ["cls", "…"]
    assert lines[-1].endswith("more fields")
    assert screen.evaluate(CUT) == []
    assert screen.input_value("[name=view]") == view


def test_fields_are_chosen_and_stay_chosen(screen, server):
    screen.goto(server.url)
    cards(screen)
    screen.click("summary:has-text('fields')")
    screen.click(".choices label:has-text('cls')")
    assert screen.evaluate("document.documentElement.scrollWidth") <= screen.viewport_size["width"]
    until(screen, "document.querySelector('.card p')?.textContent === 'cls 0'")
    screen.click(".choices label:has-text('seg.png')")
    until(screen, "document.querySelector('.card img')?.alt === 'seg.png'")
    assert screen.locator(".card[data-position='0'] p").count() == 1
    screen.mouse.click(200, 600)
    screen.keyboard.press("Escape")
    until(screen, "location.hash.includes('shown=cls%2Cseg.png')")
    screen.fill("[name=query]", "cls == 3")
    screen.press("[name=query]", "Enter")
    until(screen, "/^12 samples/.test(document.querySelector('.status').textContent)")
    assert "shown=cls" in screen.url
    assert screen.text_content(".card p") == "cls 3"


def test_a_table_has_a_column_for_each_field(screen, server):
    screen.goto(server.url)
    cards(screen)
    screen.select_option("[name=view]", "table")
    screen.wait_for_selector(".row.header")
    keys = cards(screen)
    assert keys == [sample(number)["__key__"] for number in range(len(keys))]
    assert len(keys) > 12
    names = screen.eval_on_selector_all(".header span", "all => all.map(each => each.textContent)")
    assert names[:2] == ["key", "txt"]
    assert {*names[1:]} == {*sample(0)} - {"__key__"}
    lefts = "all => all.map(each => each.getBoundingClientRect().left)"
    columns = screen.eval_on_selector_all(".header span", lefts)
    cells = screen.eval_on_selector_all(".card:nth-child(3) > span", lefts)
    assert columns == pytest.approx(cells, abs=1)
    assert min(np.diff(columns)) > 80
    screen.keyboard.press("End")
    assert cards(screen)[-1] == sample(59)["__key__"]
    bottoms = screen.eval_on_selector_all(".card", "all => all.map(each => each.getBoundingClientRect().bottom)")
    assert max(bottoms) <= screen.viewport_size["height"] + 1
    screen.keyboard.press("Enter")
    screen.wait_for_selector("[data-shown]")
    screen.keyboard.press("Escape")
    screen.wait_for_selector(".row.card.active")
    screen.select_option("[name=view]", "medium")
    screen.wait_for_selector(".card:not(.row) p")
    assert "view=" not in screen.url


def test_a_video_is_shown_by_a_frame_of_its_own(screen, media):
    screen.goto(media.url)
    cards(screen)
    until(screen, "document.querySelectorAll('.card .visual canvas').length >= 4")
    first = ".card[data-position='0'] .visual canvas"
    for number in range(4):
        until(screen, pixels(f".card[data-position='{number}'] .visual canvas") + " > 300")  # the mask has two
    assert screen.get_attribute(first, "aria-label") == "mp4 ▶ 4.0 s"
    shape = screen.eval_on_selector(first, "each => [each.width, each.height]")
    assert shape == [96, 64]
    assert screen.locator("video").count() == 0  # none goes on loading


def test_sounds_have_a_spectrogram_and_a_player(screen, media):
    screen.goto(f"{media.url}#match=sound")
    cards(screen)
    first = ".card[data-position='0'] .visual canvas"
    until(screen, f"{pixels(first)} > 30")
    assert screen.get_attribute(first, "aria-label") == "wav 1.0 s"
    screen.click("[aria-label='play wav'] >> nth=1")
    until(screen, "document.querySelectorAll(\"[aria-label='stop wav']\").length === 1")
    assert screen.locator("[data-shown]").count() == 0
    screen.click("[aria-label='stop wav']")
    until(screen, "document.querySelectorAll(\"[aria-label='stop wav']\").length === 0")
    screen.goto(f"{media.url}#key=sound2")
    screen.wait_for_selector("canvas[data-drawn]")
    assert "3.00 s, 1 channel; spectrogram from 0 to 8 kHz" in screen.text_content("[aria-label=wav]")
    assert screen.evaluate(pixels("canvas.spectrum")) > 30
    screen.click("canvas.wave", position={"x": 100, "y": 20})
    width = screen.locator("canvas.wave").bounding_box()["width"]
    until(screen, f"Math.abs(document.querySelector('audio').currentTime - {300 / width}) < 0.1")
    until(screen, "document.querySelectorAll('.now:not([hidden])').length === 2")


def test_curves_follow_the_video(screen, media):
    screen.goto(f"{media.url}#match=curves")
    until(screen, f"{pixels('.card .visual canvas')} > 3")
    show(screen, f"{media.url}#sample=1")
    assert screen.locator("[aria-label='action.npy'] canvas.curves").count() == 1
    assert screen.evaluate(pixels("canvas.curves")) > 20
    assert screen.locator("[aria-label='action.npy'] canvas").count() == 2  # with the histogram
    until(screen, "document.querySelector('video').readyState >= 1")
    box = screen.locator("canvas.curves").bounding_box()
    screen.click("canvas.curves", position={"x": box["width"] / 2, "y": 20})
    until(screen, "Math.abs(document.querySelector('video').currentTime - 2) < 0.1")
    until(screen, "Math.abs(parseFloat(document.querySelector('.now').style.left) - 50) < 3")


def test_damage_is_shown_in_the_grid(screen, tmp_path):
    with serving(damaged(tmp_path)) as server:
        found = get_json(f"{server.url}rows?begin=0&count=100")
        screen.goto(server.url)
        cards(screen)
        until(screen, f"document.querySelector('.status').textContent.startsWith('{found['total']} samples')")
        texts = {}
        for share in np.linspace(0, 1, 12):
            screen.eval_on_selector(".scroller", f"each => each.scrollTop = each.scrollHeight * {share}")
            cards(screen)
            pairs = screen.eval_on_selector_all(".card", "all => all.map(each => [each.ariaLabel, each.textContent])")
            texts |= dict(pairs)
        assert texts.keys() == {row["key"] for row in found["rows"]}
        for row in found["rows"]:
            assert ("gap of" in texts[row["key"]]) == ("gaps" in row)
        screen.goto(f"{server.url}#show=shards&check=0")
        screen.wait_for_selector(".damage .gap")
        bar = screen.locator(".damage").bounding_box()
        for gap in screen.locator(".damage .gap").all():
            box = gap.bounding_box()
            assert box["width"] >= 2.9
            assert box["x"] + box["width"] <= bar["x"] + bar["width"] + 0.1
        assert "gap: no valid members" in screen.text_content(".legend")
        assert screen.text_content("[aria-label=damage] p").startswith(screen.text_content("tbody td") + ", ")
        tops = """all => all.map((each) => {
          const range = document.createRange();
          range.selectNodeContents(each);
          return new Set([...range.getClientRects()].map((line) => line.top)).size;
        })"""
        assert max(screen.eval_on_selector_all("th, td:last-child a", tops)) == 1, "no word is broken"


def test_the_query_box_completes_and_says_what_is_wrong(screen, server):
    screen.goto(server.url)
    cards(screen)
    screen.keyboard.press("/")
    screen.wait_for_selector("#completions li")
    screen.keyboard.type("cl")
    until(screen, "document.querySelectorAll('#completions li').length === 1")
    box = screen.locator("#completions").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= screen.viewport_size["width"]
    screen.keyboard.press("Tab")
    screen.keyboard.type(" = 3 order:-size:r")
    screen.keyboard.press("ArrowDown")
    screen.keyboard.press("Enter")
    assert screen.input_value("[name=query]") == "cls = 3 order:-size:raw"
    screen.keyboard.press("Enter")
    until(screen, "document.querySelector('.status.error')?.textContent.includes('use == to compare, not =')")
    screen.fill("[name=query]", "cls == 3 order:-size:raw")
    screen.press("[name=query]", "Enter")
    until(screen, "/^12 samples/.test(document.querySelector('.status').textContent)")
    expected = [sample(number)["__key__"] for number in range(58, 0, -5)]
    assert cards(screen) == expected[: len(cards(screen))]
    assert screen.evaluate("location.hash") == "#order=-size%3Araw&where=cls+%3D%3D+3"
    screen.fill("[name=query]", "part1/00004")
    screen.press("[name=query]", "Enter")
    screen.wait_for_selector("[data-shown]")
    screen.goto(f"{server.url}#match=part1")
    assert screen.input_value("[name=query]") == "part1"


def test_all_is_searched_with_progress(screen, server, monkeypatch):
    """A slow search goes on to its end when that is asked for, and stops when another query comes."""
    rows, searched = server.api.queries.rows, []

    def slowly(query, begin, count, seconds=0.5):
        if not query:
            return rows(query, begin, count)
        searched.append(begin)
        done = len(searched) > 6
        part = {"done": done, "searched": 60 if done else 8 * len(searched), "failed": 0, "about": {}}
        total = 60 if done else 40 + len(searched)
        return {"total": total, **part, "rows": server.api.viewed.rows(range(begin, min(begin + count, total)))}

    monkeypatch.setattr(server.api.queries, "rows", slowly)
    screen.goto(f"{server.url}#match=part")
    screen.wait_for_selector("progress")
    assert "of 60 searched" in screen.text_content(".status")
    assert screen.evaluate("document.querySelector('progress').max") == 60
    screen.click("text=search all")
    until(screen, "document.querySelector('.status').textContent === '60 samples'")
    assert max(searched) == 10**7
    until(screen, "!document.querySelector('progress').checkVisibility()")


def test_fields_are_copied_and_downloaded(screen, server):
    screen.context.grant_permissions(["clipboard-read", "clipboard-write"])
    show(screen, f"{server.url}#sample=7")
    screen.click("[aria-label='copy txt']")
    until(screen, "document.querySelector(\"[aria-label='copy txt']\").textContent === 'copied'")
    assert screen.evaluate("navigator.clipboard.readText()") == sample(7)["txt"]
    screen.click("[aria-label='copy the line of Python']")
    until(screen, "document.querySelector(\"[aria-label='copy the line of Python']\").textContent === 'copied'")
    assert screen.evaluate("navigator.clipboard.readText()").startswith("tarshards.IndexedShards(")
    sizes = {field["name"]: field["size"] for field in get_json(f"{server.url}sample?number=7")["fields"]}
    for field in ("raw", "html", "jpg"):
        with screen.expect_download() as download:
            screen.click(f"[aria-label='download {field}']")
        with open(download.value.path(), "rb") as file:
            data = file.read()
        assert len(data) == sizes[field]
        assert download.value.suggested_filename.endswith(f"00007.{field}")


def test_panels_take_no_room_until_they_are_opened(screen, server):
    screen.goto(server.url)
    cards(screen)
    assert screen.locator("aside").bounding_box()["height"] < 40
    assert screen.locator("main").bounding_box()["width"] == screen.viewport_size["width"]
    screen.click("summary:has-text('histograms')")
    screen.wait_for_selector(".bar")
    labels = screen.eval_on_selector_all(".bar span:nth-child(2)", "all => all.map(each => each.textContent)")
    assert labels == ["0", "1", "2", "3", "4"]
    screen.click("summary:has-text('epoch')")
    label = screen.locator("label:has([name=shuffle])").bounding_box()
    assert label["height"] < 40


def test_a_static_page_has_the_same_without_a_server(screen, tmp_path):
    (tmp_path / "files").mkdir()
    with ShardWriter(f"{tmp_path}/files/m-%03d.tar", max_samples=100) as writer:
        for number in range(40):
            fields = {"wav": sound(1), "txt": f"text {number} " * 40, "cls": number % 3}
            fields |= {"mp4": videos.written(count=10), "npy": np.sin(np.arange(50.0))}
            writer.write({"__key__": f"{number:03d}", **fields})
    write_static_page(f"{tmp_path}/files/m-000.tar", str(tmp_path / "files"))
    with nginx(tmp_path) as url:
        screen.goto(f"{url}/index.html#view=large")
        cards(screen)
        until(screen, f"{pixels('.card .visual canvas')} > 100")
        assert screen.text_content(".card p").startswith("txt text 0 ")
        screen.select_option("[name=view]", "table")
        screen.wait_for_selector(".row.header")
        cards(screen)
        screen.fill("[name=query]", "has:txt 00")
        screen.press("[name=query]", "Enter")
        until(screen, "document.querySelector('.status').textContent === '10 samples'")
        screen.fill("[name=query]", "cls == 3")
        screen.press("[name=query]", "Enter")
        until(screen, "document.querySelector('.status.error')?.textContent.startsWith('this page has no where=')")
        show(screen, f"{url}/index.html#sample=3")
        with screen.expect_download() as download:
            screen.click("[aria-label='download wav']")
        with open(download.value.path(), "rb") as file:
            assert file.read() == sound(1)
        screen.wait_for_selector("canvas[data-drawn]")
        assert screen.evaluate(pixels("canvas.curves")) > 3
    log = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert {status for path, status, _ in log if path.endswith(".tar")} <= {"206", "304"}
