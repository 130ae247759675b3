"""The modules of the page: they parse no HTML, form one module, and agree with Python on fields."""

from __future__ import annotations

import json
import re
import subprocess

import numpy as np
import pytest
from programs import need

from tarshards.view.page_text import EXPORT, FILES, bundled

MODULES = sorted(name for name in FILES if name.endswith(".js"))
NEVER = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc|\.href\s*="


@pytest.mark.parametrize("name", MODULES)
def test_nothing_of_a_sample_can_become_markup(name):
    assert not re.findall(NEVER, FILES[name].read_text())


@pytest.mark.parametrize("name", MODULES)
def test_a_module_says_what_it_is_and_is_short(name):
    text = FILES[name].read_text()
    assert text.startswith("// ")
    assert len(text.splitlines()) <= 300


def test_every_module_is_used_and_exports_what_others_import():
    imported = {"main.js"}
    for name in MODULES:
        for names, module in re.findall(
            r'^import \{([^}]*)\} from "\./(\w+\.js)";$', FILES[name].read_text(), re.MULTILINE
        ):
            imported.add(module)
            assert {*names.replace(" ", "").split(",")} <= {*EXPORT.findall(FILES[module].read_text())}
    assert imported == set(MODULES)


ROUTES = {
    "sample=7": 7,
    "sample=-1": "sample= is a whole number from 0, not -1",
    "sample=NaN": "sample= is a whole number from 0, not NaN",
    "sample=": "sample= is a whole number from 0, not ",
    "sample=1e3": "sample= is a whole number from 0, not 1e3",
    "sample=1.5": "sample= is a whole number from 0, not 1.5",
    f"sample={10**15}": f"sample= is a whole number from 0, not {10**15}",
    "": None,
    "match=a": None,
    "field=jpg": "this page has no field=; open the shards with tarview",
    "shard=5": "this page has no shard=; open the shards with tarview",
    "filter=cls": "the address has filter=, which is none of match, field, where, sizes, shard, duplicates, order, "
    "step, epoch, show, begin, check, key, sample, position, view, shown",
    "view=table&shown=jpg": None,
    "__proto__=1": "the address has __proto__=, which is none of ",
    "toString=1": "the address has toString=, which is none of ",
}


def test_what_an_address_names_is_checked(tmp_path):
    need("node")
    (tmp_path / "route.mjs").write_text(FILES["route.js"].read_text())
    (tmp_path / "test.mjs").write_text("""
import { checkQuery, numberOf, queryOf, route } from "./route.mjs";
const told = [];
for (const hash of JSON.parse(process.argv[2])) {
  globalThis.location = { hash: `#${hash}` };
  try {
    const entries = route();
    checkQuery(queryOf(entries), new Set());
    told.push(numberOf(entries, "sample") ?? null);
  } catch (error) {
    told.push(error.message);
  }
}
console.log(JSON.stringify(told));
""")
    done = subprocess.run(
        ["node", tmp_path / "test.mjs", json.dumps(list(ROUTES))], capture_output=True, text=True, check=True
    )
    for told, (hash, expected) in zip(json.loads(done.stdout), ROUTES.items(), strict=True):
        if isinstance(expected, str) and expected.endswith("none of "):
            assert told.startswith(expected)
        else:
            assert told == expected, hash


@pytest.mark.parametrize(
    ("name", "data", "seen"),
    [
        ("size", b"670\n", "670"),
        ("html", b"<p>x</p>", "<p>x</p>"),
        ("raw", "ü".encode() * 3, "üüü"),
        ("raw", "ü".encode()[:1] * 3, ""),
        ("raw", b"a\0b", ""),
        ("pkl", b"\x80\x04K\x07.", ""),
        ("jpg", b"abc", ""),
        ("cls", b"7\n", "7"),
    ],
)
def test_a_card_shows_text_whatever_its_extension(tmp_path, name, data, seen):
    found = run(tmp_path, f"""
import {{ preview, setTypes }} from "./values.js";
setTypes({{ jpg: "image/jpeg" }});
console.log(JSON.stringify(preview({{ name: "{name}", size: {len(data)} }}, new Uint8Array({list(data)}), 80)));
""")  # fmt: skip
    assert found == seen


def test_a_text_that_is_too_large_is_not_copied_as_another(tmp_path):
    """The word null was."""
    found = run(tmp_path, """
import { textOf } from "./fields.js";
const source = { bytes: async () => new TextEncoder().encode("abc") };
const told = (size) => textOf({}, { name: "txt", size }, source).catch((error) => `error: ${error.message}`);
console.log(JSON.stringify([await told(3), await told(2 ** 24 + 1)]));
""")  # fmt: skip
    assert found == ["abc", "error: more than 16.8 MB"]


def run(folder, program):
    """Return what a program prints as JSON; it may import the modules of the page."""
    need("node")
    for module in MODULES:
        (folder / module).write_text(FILES[module].read_text())
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "program.js").write_text(program)
    done = subprocess.run(["node", folder / "program.js"], capture_output=True, text=True)
    assert done.stderr == ""
    return json.loads(done.stdout)


TEXTS = {
    "": {},
    "part1/00007": {"match": "part1/00007"},
    "cls == 3": {"where": "cls == 3"},
    'json["ok"] and has("jpg") order:-size': {"where": 'json["ok"] and has("jpg")', "order": "-size"},
    'key:"a b" cls > 2': {"match": "a b", "where": "cls > 2"},
    "has:seg.png same:key": {"field": "seg.png", "duplicates": "key"},
    "shard:3 size:jpg:0-9": {"shard": "3", "sizes": "jpg:0-9"},
    'txt[:3] == "key:x y"': {"where": 'txt[:3] == "key:x y"'},
    "not ok": {"where": "not ok"},
    "ok": {"match": "ok"},
    "it's": {"match": "it's"},
    "key:a=b": {"match": "a=b"},
    'key:"#1"': {"match": "#1"},
}


def test_the_text_of_the_query_box_stands_for_a_query(tmp_path):
    queries = [*TEXTS.values(), {"where": "ok"}, {"match": 'a "b"\\'}, {"match": "order:key"}, {"order": "size:a b"}]
    read, written = run(tmp_path, f"""
import {{ formatQuery, parseQuery }} from "./query_text.js";
const again = (query) => parseQuery(formatQuery(query));
console.log(JSON.stringify([{json.dumps(list(TEXTS))}.map(parseQuery), {json.dumps(queries)}.map(again)]));
""")  # fmt: skip
    assert read == list(TEXTS.values())
    assert written == [query if query != {"where": "ok"} else {"where": "(ok)"} for query in queries]


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("c", ["cls"]),
        ("cls == 1 and wi", ["width"]),
        ("has:s", ["seg.png", "cls"]),
        ("order:-wi", ["-width"]),
        ("same:", ["key", "content"]),
        ('json["c', []),
        ("2d", ['fields["2d.npy"]']),
        ("k", ["key:", "key"]),
        ("wid(h", ["has(", "width"]),
    ],
)
def test_the_query_box_completes_what_exists(tmp_path, text, options):
    names = {"fields": ["jpg", "seg.png", "cls", "2d.npy"], "columns": ["width"]}
    found = run(tmp_path, f"""
import {{ complete }} from "./query_text.js";
console.log(JSON.stringify(complete({json.dumps(text)}, {len(text)}, {json.dumps(names)}, () => true).options));
""")  # fmt: skip
    assert [name for name, _ in found] == options


def test_the_powers_of_a_window_are_those_of_numpy(tmp_path):
    samples = np.random.default_rng(0).normal(size=512)
    found = run(tmp_path, f"""
import {{ powersOf }} from "./sounds.js";
console.log(JSON.stringify([...powersOf(Float64Array.from({samples.tolist()}))]));
""")  # fmt: skip
    expected = np.abs(np.fft.rfft(samples * (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(512) / 512)))) ** 2
    np.testing.assert_allclose(found, expected[:256], rtol=1e-4, atol=1e-4)


def test_the_modules_are_javascript(tmp_path):
    need("node")
    (tmp_path / "whole.js").write_text(bundled("main.js"))
    paths = [*(FILES[name] for name in MODULES), tmp_path / "whole.js"]
    program = """
        for (const path of process.argv.slice(1))
            new vm.SourceTextModule(fs.readFileSync(path, "utf8"), { identifier: path });
    """
    command = ["node", "--experimental-vm-modules", "--no-warnings", "--eval", program, *paths]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
