"""The page in Chromium: scrolling, sound and video, filters, batches, hostile samples, and pages without a server."""

from __future__ import annotations

import io
import json
import os
import resource
import socket
import subprocess
import wave
from contextlib import contextmanager, suppress

import numpy as np
import pytest
import videos
from programs import find, need
from rigs.browser import cards, show, until
from shard_rig import HOSTILE, get, sample, serving, write_set

from tarshards import ShardWriter, TarWriter
from tarshards.index.build import build_index
from tarshards.samples.codecs import encode_field
from tarshards.samples.lines import read_keys
from tarshards.view.contact_sheet import write_contact_sheet
from tarshards.view.static_page import write_static_page

pytestmark = pytest.mark.interop


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(write_set(tmp_path_factory.mktemp("set"))) as server:
        yield server


def test_a_grid_of_many_samples_scrolls_to_its_end_in_bounded_memory(page, tmp_path):
    with TarWriter(str(tmp_path / "set-00.tar")) as writer:
        for number in range(5000):
            writer.write({"__key__": f"{number:06d}", "txt": f"text {number}", "cls": number % 7})
    build_index(str(tmp_path / "set-00.tar")).save(str(tmp_path / "set-00.tar"))
    for shard in range(1, 20):
        for ending in ("", ".index"):
            os.link(tmp_path / f"set-00.tar{ending}", tmp_path / f"set-{shard:02d}.tar{ending}")
    with serving(str(tmp_path / "set-{00..19}.tar")) as server:
        page.goto(server.url)
        assert cards(page)[0] == "000000"
        assert "100,000 samples" in page.text_content(".status")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for share in range(1, 21):
            page.eval_on_selector(".scroller", f"each => each.scrollTop = each.scrollHeight * {share / 20}")
            cards(page)
        page.keyboard.press("End")
        assert cards(page)[-1] == "004999"
        assert page.get_attribute(".card.active", "data-position") == "99999"
        assert page.evaluate("document.querySelectorAll('*').length") < 1000
        assert page.evaluate("performance.memory.usedJSHeapSize") < 64e6
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB
        page.keyboard.press("Home")
        assert cards(page)[0] == "000000"


def test_a_grid_that_is_taller_than_browsers_scroll(page, server, monkeypatch):
    """Sample 10^9 is reached by the keyboard, the wheel and the scroll bar; each row is that of its number."""

    def rows(query, begin, count, seconds=0.5):
        numbers = range(begin, min(begin + count, 10**9))
        rows = [{"number": number, "key": f"key {number}", "shard": "a.tar", "fields": []} for number in numbers]
        return {"total": 10**9, "done": True, "rows": rows}

    monkeypatch.setattr(server.api.queries, "rows", rows)
    monkeypatch.setitem(server.api.methods, "about", lambda parameters: {**server.api.about({}), "total": 10**9})
    page.goto(server.url)
    assert cards(page)[0] == "key 0"
    page.keyboard.press("End")
    assert cards(page)[-1] == f"key {10**9 - 1}"
    page.keyboard.press("Home")
    first = cards(page)
    page.mouse.move(700, 400)
    page.mouse.wheel(0, 236)
    page.wait_for_timeout(200)
    columns = cards(page)
    assert columns[0] in first  # the wheel moves by rows, not by millions of them
    page.eval_on_selector(".scroller", "each => each.scrollTop = each.scrollHeight / 2")
    page.wait_for_timeout(200)
    assert abs(int(cards(page)[0].split()[1]) - 5 * 10**8) < 10**6


def test_filters_have_links_and_go_by_the_keyboard(page, server):
    page.goto(server.url)
    cards(page)
    page.keyboard.press("/")
    page.keyboard.type("part1/00007")
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-shown]")
    assert page.text_content("h2") == "part1/00007"
    page.keyboard.press("ArrowRight")
    until(page, "document.querySelector('h2')?.textContent === 'part2/00008'")
    page.keyboard.press("Escape")
    page.fill("[name=query]", "cls == 3")
    page.press("[name=query]", "Enter")
    until(page, "/12 samples/.test(document.querySelector('.status').textContent)")
    expected = [sample(number)["__key__"] for number in range(3, 60, 5)]
    assert cards(page) == expected[: len(cards(page))]
    link = page.url
    page.goto("about:blank")
    page.goto(link)
    assert cards(page)[0] == expected[0]
    page.fill("[name=query]", "cls ==")
    page.press("[name=query]", "Enter")
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_selector(".status.error")
    page.wait_for_timeout(500)
    assert len(asked) <= 1  # an error is not asked for again and again
    page.click("text=clear")
    assert len(cards(page)) > 3


def test_going_back_from_a_sample_finds_the_place_in_the_grid(page, server):
    page.goto(server.url)
    cards(page)
    page.eval_on_selector(".scroller", "each => each.scrollTop = 1524")
    before = cards(page)
    page.click(f".card[aria-label='{before[3]}'] b")
    page.wait_for_selector("[data-shown]")
    assert page.text_content("h2") == before[3]
    page.keyboard.press("ArrowRight")
    until(page, f"document.querySelector('h2')?.textContent === '{before[4]}'")
    page.keyboard.press("Escape")
    page.wait_for_selector(".card.active")
    assert cards(page) == before
    assert page.get_attribute(".card.active", "aria-label") == before[4]


def test_a_bar_of_a_histogram_filters(page, server):
    page.goto(server.url)
    cards(page)
    page.click("summary:has-text('histograms')")
    page.click(".bar:first-of-type")
    until(page, "/12 samples/.test(document.querySelector('.status').textContent)")
    assert "where" in page.url


def test_a_selection_is_a_list_of_keys(page, server):
    page.goto(server.url)
    expected = cards(page)
    page.click(".card[data-position='1'] .mark")
    page.keyboard.press("Shift+ArrowRight")
    page.keyboard.press("Shift+ArrowRight")
    with page.expect_download() as download:
        page.click("text=save keys")
    with open(download.value.path()) as file:
        assert file.read().splitlines() == expected[1:4]
    with page.expect_download() as download:
        page.click("text=all keys")
    with open(download.value.path()) as file:
        assert len(file.read().splitlines()) == 60


def test_a_batch_is_that_of_its_step(page, server):
    epoch = json.dumps({"seed": 3, "batch_size": 6, "ranks": 2, "rank": 1})
    page.goto(server.url)
    cards(page)
    page.click("summary:has-text('epoch')")
    for name, value in {"seed": 3, "batch_size": 6, "ranks": 2, "rank": 1, "step": 2}.items():
        page.fill(f".panel [name={name}]", str(value))
    page.click("text=show the batch")
    until(page, "/^6 samples/.test(document.querySelector('.status').textContent)")
    found = server.api.rows({"begin": "0", "count": "6", "step": "2", "epoch": epoch})
    assert cards(page) == [row["key"] for row in found["rows"]]
    assert "batch 2 of 5" in page.text_content("aside")
    page.click("[aria-label='next batch']")
    until(page, "/batch 3 of/.test(document.querySelector('aside').textContent)")


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("shard=5", "there is no shard 5 of 3"),
        ("shard=-1", "shard= is a whole number from 0"),
        ("step=x", "step= is a whole number from 0"),
        ("step=0&epoch=3", "object is not a mapping"),
        ("filter=cls", "the address has filter="),
        ("sample=NaN", "sample= is a whole number from 0, not NaN"),
        ("sample=60", "there is no sample 60 of 60"),
        ("sample=0&position=-1", "position= is a whole number from 0"),
        ("show=none", "this page has no list of none"),
        ("show=shards&begin=x", "begin= is a whole number from 0"),
        ("show=shards&check=9", "there is no shard 9 of 3"),
        ("key=none", "no sample has the key none"),
    ],
)
def test_an_address_that_names_nothing_says_so_and_the_page_goes_on(page, server, address, words):
    page.goto("about:blank")
    page.goto(f"{server.url}#{address}")
    until(
        page, f"[...document.querySelectorAll('.error')].some(each => each.textContent.includes({json.dumps(words)}))"
    )
    page.goto(f"{server.url}#shard=1")
    until(page, "/^20 samples/.test(document.querySelector('.status').textContent)")


def test_damage_and_a_ledger_link_to_their_samples(page, tmp_path):
    urls = write_set(tmp_path)
    key = sample(27)["__key__"]
    left_out = [{"shard": "set-001.tar", "key": key, "field": "jpg", "offset": 512, "reason": HOSTILE}]
    with serving(urls, left_out=left_out) as server:
        offset = server.api.sample({"number": "25"})["fields"][0]["offset"] - 512
        with open(tmp_path / "set-001.tar", "r+b") as file:
            file.seek(offset)
            file.write(b"XXXX")
        page.goto(server.url)
        page.click("text=ledger (1)")
        page.click(f"td >> text={key}")
        page.wait_for_selector("[data-shown]")
        assert page.text_content("h2") == key
        page.click("text=shards")
        page.click("tr:nth-child(2) >> text=check")
        page.wait_for_selector(".damage .gap")
        assert page.locator(".damage .gap").count() == 1
        assert f"offset {offset:,}" in page.text_content("[aria-label=damage]")
        page.click("tr:nth-child(2) >> text=set-001.tar")
        until(page, "/20 samples/.test(document.querySelector('.status').textContent)")
        assert cards(page)[0] == sample(20)["__key__"]


def test_shards_without_indexes_grow_as_one_scrolls(page, tmp_path):
    with serving(write_set(tmp_path, 200, index=False)) as server:
        page.goto(server.url)
        assert cards(page)[0] == sample(0)["__key__"]
        assert "so far; no index found" in page.text_content(".status")
        for _ in range(10):
            page.keyboard.press("End")
            cards(page)
        assert cards(page)[-1] == sample(199)["__key__"]
        assert page.text_content(".status").startswith("200 samples;")


def test_nothing_of_a_sample_is_executed(page, server):
    show(page, f"{server.url}#sample=5")
    text = page.inner_text(".detail")
    shown = HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    assert shown in text
    assert text.count("onload=") == 1
    page.goto(f"{server.url}#match={HOSTILE}")
    page.wait_for_timeout(300)
    assert "tarview" in page.title()
    assert page.locator(".detail img[src=x], .card img[src=x], svg, .detail script").count() == 0
    policy = get(server.url)[1]["Content-Security-Policy"]
    assert "'unsafe" not in policy


def test_hostile_keys_and_names_stay_text(page, tmp_path):
    keys = ["<img src=x onerror=alert(1)>", "javascript:alert(1)", "\x1b[31mred\u202e", "caf\udce9", "\U00010080\\"]
    with TarWriter(str(tmp_path / "a.tar")) as writer:
        for key in keys:
            writer.write({"__key__": key, "<b>x": b"<i>1</i>", "json": {"<u>": HOSTILE}})
    with serving(str(tmp_path / "a.tar")) as server:
        page.goto(server.url)
        assert cards(page) == [
            "<img src=x onerror=alert(1)>",
            "javascript:alert(1)",
            "\\x1b[31mred\\u202e",
            "caf\\xe9",
            keys[4],
        ]
        assert page.locator(".card :is(i i, u, img)").count() == 0
        page.keyboard.press("Space")
        for _ in range(4):
            page.keyboard.press("Shift+ArrowRight")
        with page.expect_download() as download:
            page.click("text=save keys")
        assert list(read_keys(str(download.value.path()))) == keys
        for number in range(5):
            show(page, f"{server.url}#sample={number}")
            assert "alert" not in page.title()


def test_a_page_of_another_origin_gets_nothing(page, server, chromium, tmp_path):
    with serving(write_set(tmp_path, 20)) as other:
        page.goto(other.url)
        assert page.evaluate("url => fetch(url).then(() => 'read', () => 'refused')", server.url + "about") == "refused"
        assert page.goto(f"http://127.0.0.1:{server.server_port}/").status == 403


def test_fields_are_shown_by_their_kind(page, server):
    show(page, f"{server.url}#sample=7")
    until(page, "document.querySelector('[aria-label=jpg] img').naturalWidth == 80")
    assert page.locator("[aria-label=jpg] canvas.boxes").count() == 1
    page.click("text=seg.png over it")
    until(page, "document.querySelector('[aria-label=jpg] .mask').dataset.drawn && true")
    assert "float32 16 x 24, 384 elements" in page.text_content("[aria-label=npy]")
    assert page.locator("[aria-label=npy] canvas").count() == 2
    assert "000000c0" in page.text_content("[aria-label=raw]")
    assert "packed: [3 items]" in page.text_content("[aria-label=mp]")
    assert "tarcat --slice 7:8" in page.text_content("[aria-label=commands]")


def sound(seconds=2, rate=8000):
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, rate, 0, "NONE", ""))
        wave_form = np.sin(np.arange(seconds * rate) * 0.2) * np.linspace(0, 30000, seconds * rate)
        writer.writeframes(wave_form.astype("<i2").tobytes())
    return file.getvalue()


def test_audio_plays_and_has_a_wave_form(page, tmp_path):
    with TarWriter(str(tmp_path / "a.tar")) as writer:
        writer.write({"__key__": "a", "wav": sound()})
    with serving(str(tmp_path / "a.tar")) as server:
        show(page, f"{server.url}#sample=0")
        page.wait_for_selector("canvas[data-drawn]")
        assert "2.00 s, 1 channel" in page.text_content("[aria-label=wav]")
        page.evaluate("document.querySelector('audio').muted = true")
        page.evaluate("document.querySelector('audio').play()")
        until(page, "document.querySelector('audio').currentTime > 0.2")
        drawn = "[...document.querySelector('canvas.wave').getContext('2d').getImageData(700, 0, 1, 96).data]"
        assert page.evaluate(f"{drawn}.filter((value, at) => at % 4 === 3 && value).length") > 40


def with_free_space(video, size):
    """Return an MP4 with *size* bytes that nothing reads between its frames and their table."""
    at = video.index(b"moov") - 4
    return video[:at] + (size + 8).to_bytes(4, "big") + b"free" + bytes(size) + video[at:]


def test_video_seeks_by_ranges(page, tmp_path):
    data = with_free_space(videos.written(count=200, size=(160, 240), group=10), 60_000_000)
    with TarWriter(str(tmp_path / "a.tar")) as writer:
        writer.write({"__key__": "a", "mp4": data, "cls": 1})
    begins = []
    with serving(str(tmp_path / "a.tar")) as server:
        field = server.api.methods["field"]

        def observed(parameters):
            file = field(parameters)
            seek = file.seek
            file.seek = lambda begin: (begins.append(begin), seek(begin))[1]
            return file

        server.api.methods["field"] = observed
        show(page, f"{server.url}#sample=0")
        until(page, "document.querySelector('video').readyState >= 2")
        page.evaluate("document.querySelector('video').currentTime = 15")
        until(page, "(({readyState, seeking}) => readyState >= 2 && !seeking)(document.querySelector('video'))")
        assert page.evaluate("document.querySelector('video').videoWidth") == 240
        page.goto("about:blank")
    assert begins[0] == 0
    assert max(begins) > 60_000_000, "the browser read through the free space to the table of frames"


@contextmanager
def nginx(folder, settings=""):
    """Serve a folder by a web server that we did not write; yield its URL."""
    need("nginx")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (folder / "nginx.conf").write_text(f"""
        daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
        events {{}}
        http {{
            log_format short '$uri $status $body_bytes_sent'; access_log {folder}/log short;
            client_body_temp_path {folder}/0;
            proxy_temp_path {folder}/1; fastcgi_temp_path {folder}/2; uwsgi_temp_path {folder}/3;
            scgi_temp_path {folder}/4; types {{ text/html html; }}
            server {{ listen 127.0.0.1:{port}; root {folder}/files; {settings} }}
        }}""")
    command = [find("nginx"), "-e", f"{folder}/error.log", "-c", f"{folder}/nginx.conf"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def test_a_static_page_reads_indexes_and_members_by_ranges(page, tmp_path):
    (tmp_path / "files").mkdir()
    urls = write_set(tmp_path / "files")
    write_static_page(urls, str(tmp_path / "files"))
    with nginx(tmp_path) as url:
        page.goto(f"{url}/index.html")
        keys = [sample(number)["__key__"] for number in range(60)]
        assert cards(page) == keys[: len(cards(page))]
        until(page, "document.querySelector('.card img')?.naturalWidth === 80")
        assert "cls 0" in page.text_content(".card")
        show(page, f"{url}/index.html#key=part1/00040")
        until(page, "document.querySelector('[aria-label=jpg] img').naturalWidth == 80")
        assert HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e") in page.inner_text("[aria-label=html]")
        assert "float32 16 x 24" in page.text_content("[aria-label=npy]")
        page.goto(f"{url}/index.html#match=/0005&field=jpg")
        until(page, "/10 samples/.test(document.querySelector('.status').textContent)")
        assert cards(page) == keys[50:][: len(cards(page))]
    log = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    tars = [(status, int(size)) for path, status, size in log if path.endswith(".tar")]
    assert {status for status, _ in tars} <= {"206", "304"}
    assert max(size for _, size in tars) < (tmp_path / "files/set-000.tar").stat().st_size


def test_a_static_page_notices_a_shard_that_was_written_again(page, tmp_path):
    (tmp_path / "files").mkdir()
    write_static_page(write_set(tmp_path / "files", 20), str(tmp_path / "files"))
    index = (tmp_path / "files/set-000.tar.index").read_bytes()
    with ShardWriter(str(tmp_path / "files/set-%03d.tar"), max_samples=20) as writer:
        for number in range(20):
            writer.write(sample(number) | {"raw": bytes(5000)})
    (tmp_path / "files/set-000.tar.index").write_bytes(index)
    with nginx(tmp_path) as url:
        show(page, f"{url}/index.html#sample=9")
        assert "stale index" in page.text_content(".detail")


@pytest.mark.parametrize("allowed", [True, False])
def test_a_static_page_reads_shards_of_another_origin_that_allows_it(page, tmp_path, allowed):
    (tmp_path / "files").mkdir()
    write_set(tmp_path / "files", 20)
    (tmp_path / "page").mkdir()
    (tmp_path / "page/files").mkdir()
    cors = "add_header Access-Control-Allow-Origin *; add_header Access-Control-Allow-Headers Range;"
    with nginx(tmp_path, cors * allowed) as shards, nginx(tmp_path / "page") as url:
        write_static_page(f"{shards}/set-000.tar", str(tmp_path / "page/files"))
        page.goto(f"{url}/index.html")
        if allowed:
            assert cards(page)[0] == sample(0)["__key__"]
        else:
            page.wait_for_selector(".status.error")


def test_a_contact_sheet_is_the_same_page_in_one_file(page, tmp_path):
    samples = [sample(number) for number in range(30)]
    encoded = [{"__key__": each["__key__"], "__url__": "a.tar", **encode_sample(each)} for each in samples]
    write_contact_sheet(encoded, str(tmp_path / "a.html"), title=f"title {HOSTILE}")
    page.goto(f"file://{tmp_path}/a.html")
    assert cards(page)[:3] == [each["__key__"] for each in samples[:3]]
    until(page, "document.querySelector('.card img')?.naturalWidth === 80")
    show(page, f"file://{tmp_path}/a.html#sample=7")
    until(page, "document.querySelector('[aria-label=jpg] img').naturalWidth == 80")
    assert HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e") in page.inner_text("[aria-label=txt]")


def encode_sample(given):
    return {field: encode_field(field, value) for field, value in given.items() if field != "__key__"}


def test_it_works_narrow_and_dark_and_its_parts_have_names(page, server):
    page.set_viewport_size({"width": 390, "height": 700})
    page.emulate_media(color_scheme="dark")
    page.goto(server.url)
    cards(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(23, 24, 27)"
    parts = "[...document.querySelectorAll('input, select, button, [role]:not([role=status]), section, nav, aside')]"
    name = "each.ariaLabel || each.labels?.length || each.textContent.trim() || each.alt"
    assert page.evaluate(f"{parts}.filter(each => !each.hidden && !({name})).map(each => each.outerHTML)") == []
