"""Build the documentation site; `make docs` runs this file.

It stages the pages in build/docs: those of docs/ and of other folders, notebooks with the outputs that they were saved
with, and the derived ones. Zensical builds them into site/, and MkDocs, whose successor it is, into build/mkdocs. Every
link of both is then followed. site/ also gets the Markdown of each page beside it, and llms.txt, a list of them.

The url in setup.cfg tells where the repository and the site are. Without one the site has no links to either.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from html.parser import HTMLParser
from importlib import import_module
from importlib.metadata import metadata
from os.path import normpath, relpath
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import api_text
import click
import notebook_text
import yaml

import tarshards
from tarshards.cli import advice

ROOT = Path(__file__).parents[1]
STAGED = ROOT / "build/docs"
#: Pages that do not lie in docs/, and where they are staged.
ELSEWHERE = {
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/PROFILE.md": "benchmarks/profile.md",
    "benchmarks/RESULTS.md": "benchmarks/results.md",
    "examples/README.md": "examples.md",
    "skills/tarshards/SKILL.md": "skill.md",
    "spec/webdataset-tar.md": "webdataset-tar.md",
}
#: Pages of figures, which the search of the site leaves out.
UNSEARCHED = ["benchmarks/profile.md", "benchmarks/results.md"]
#: What readers may type into the search, and where its first result is to lead.
SEARCHES = {
    "action chunk": "glossary/#lerobot-delta_timestamps-action-chunks",
    "azure": "glossary/#azure",
    "bad header checksum": "troubleshooting/archives/#bad-header-checksum",
    "CPU only": "glossary/#pip-install-cuda-cpu-only",
    "Croissant": "guides/publishing/#dataset-card-croissant-and-the-other-files",
    "dataset card": "guides/publishing/#dataset-card-croissant-and-the-other-files",
    "delta_timestamps": "glossary/#lerobot-delta_timestamps-action-chunks",
    "dicom": "glossary/#dicom",
    "DistributedSampler": "glossary/#distributedsampler",
    "flac": "glossary/#flac-wav-mp3-opus",
    "Hugging Face Hub": "guides/publishing/",
    "index": "glossary/#index",
    "IterableDataset": "glossary/#iterabledataset",
    "kaldi": "guides/speech/#kaldi-wavscp-text-and-segments",
    "LeRobot": "glossary/#lerobot-delta_timestamps-action-chunks",
    "lhotse": "guides/speech/#lhotse-shar",
    "lmdb": "glossary/#lmdb-lmdbcached",
    "map-style": "glossary/#map-style-dataset",
    "multi-GPU": "glossary/#multi-gpu-torchrun-ddp-fsdp-deepspeed",
    "nibabel": "guides/medicine/#files-as-they-are-dcm-nii-and-niigz-by-pydicom-and-nibabel",
    "NIfTI": "glossary/#nifti",
    "NO_COLOR": "environment/#colours-and-no_color",
    "no index found": "troubleshooting/indexes/#no-index-found-create-one-with",
    "patch": "guides/medicine/#patches-of-nifti-volumes",
    "publish": "guides/publishing/",
    "push_to_hub": "glossary/#push_to_hub",
    "pydicom": "guides/medicine/#files-as-they-are-dcm-nii-and-niigz-by-pydicom-and-nibabel",
    "resume": "glossary/#resume",
    "robot": "guides/robots/",
    "shuffle": "glossary/#shuffle",
    "shuffle buffer": "glossary/#shardshuffle-detshuffle-shuffle-buffer",
    "spawn": "glossary/#spawn-fork-forkserver-__main__",
    "tensorcom": "glossary/#tensorcom",
    "upload": "guides/publishing/#upload",
    "volume": "guides/medicine/#volumes-on-servers-and-in-object-stores",
    "windows": "install/#windows-macos-and-other-systems",
}
IMAGES = {".png", ".svg", ".gif"}
#: The public packages that are no attributes of tarshards, and which of their modules or names are shown.
PACKAGES = {
    "testing": ["testing"],
    "engines": ["engines.ray", "engines.spark", "engines.daft"],
}
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
#: Code, a link in Markdown, one in HTML, or a bracket that begins none: whichever comes first.
PART = re.compile(rf'{CODE.pattern}|{LINK.pattern}|`[^`\n]+`|((?:src|srcset|href)=")([^"]+)|\[', CODE.flags)
#: What mkdocstrings replaces by the description of a name.
SHOWN = re.compile(r"^::: (\S+)$", re.MULTILINE)


class SiteError(Exception):
    """What is wrong with the pages."""


def pages() -> dict[Path, str]:
    """Return where each page of the repository is staged."""
    found = {path: str(path.relative_to(ROOT / "docs")) for path in sorted((ROOT / "docs").rglob("*.md"))}
    found |= {path: f"troubleshooting/{path.name}" for path in sorted(advice.PAGES.glob("*.md"))}
    found |= {path: f"notebooks/{path.stem}.md" for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
    return found | {ROOT / name: target for name, target in ELSEWHERE.items()}


def stage() -> None:
    """Write all pages, and the images that they show, to build/docs."""
    shutil.rmtree(STAGED, ignore_errors=True)
    for path, target in pages().items():
        write(target, text_of(path, target))
    for target, text in reference().items():
        write(target, text)
    shutil.copy(ROOT / "docs/site.css", STAGED)


def text_of(path: Path, target: str) -> str:
    """Return the text of the page *path* as it is staged at *target*."""
    if path.suffix == ".ipynb":
        text, images = notebook_text.read(path, lambda words: linked(words, path, target))
        for name, data in images.items():
            write(f"notebooks/{name}", data)
        return text
    text = path.read_text()
    if target in UNSEARCHED:
        text = f"---\nsearch:\n  exclude: true\n---\n\n{text}"
    if target.startswith("tools/") and target != "tools/index.md":
        text += manual(path.stem)
    return linked(text, path, target)


def write(target: str, content: str | bytes) -> None:
    path = STAGED / target
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def linked(text: str, path: Path, target: str) -> str:
    """Return the text of the page *path* with the links that it needs as *target*.

    A link to a file that is no page of the site becomes its text.
    """
    staged = pages()

    def moved(link: str) -> str | None:
        url = urlsplit(link)
        if url.scheme or not url.path:
            return link
        file = Path(normpath(path.parent / unquote(url.path)))
        if file == ROOT / "README.md":
            file = ROOT / "docs/index.md"
        if not file.exists():
            raise SiteError(f"{path.relative_to(ROOT)}: no such file: {link}")
        there = staged.get(file)
        if there is None and file.suffix in IMAGES:
            there = str(file.relative_to(ROOT)).removeprefix("docs/")
            (STAGED / there).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, STAGED / there)
        if there is None:
            return None
        return relpath(there, Path(target).parent) + (f"#{url.fragment}" if url.fragment else "")

    def replaced(found: re.Match[str]) -> str:
        mark, words, link, attribute, source = found.groups()
        if link and (there := moved(link)):
            return f"{mark}[{PART.sub(replaced, words)}]({there})"
        if link:
            return str(PART.sub(replaced, words))
        if source and (there := moved(source)):
            is_below = "" if target.endswith("index.md") or urlsplit(there).scheme else "../"
            return f"{attribute}{is_below}{there}"
        if re.fullmatch("`[^`\n]+`", found[0]):  # GitHub wants an escape in a table, Python-Markdown shows it
            return found[0].replace("\\|", "|")
        return "\\[" if found[0] == "[" else found[0]

    return PART.sub(replaced, text)


def manual(name: str) -> str:
    """Return what a program says of itself, for the end of its page."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    scripts = dict(line.split(" = ") for line in setup["options.entry_points"]["console_scripts"].strip().splitlines())
    module, function = scripts[name].split(":")
    program = getattr(import_module(module), function)
    commands = {name: program} | {f"{name} {verb}": each for verb, each in getattr(program, "verbs", {}).items()}
    helps = [
        command.get_help(click.Context(command, info_name=words, **command.context_settings | {"terminal_width": 86}))
        for words, command in commands.items()
        if not command.hidden
    ]
    text = "\n\n\n".join(helps)
    return f"\n## Manual\n\n`man {name}` and `{name} --help` show this.\n\n```text\n{text}\n```\n"


def reference() -> dict[str, str]:
    """Return the pages on the public names, in the groups of docs/architecture.md, and on the public packages."""
    table = (ROOT / "docs/architecture.md").read_text().partition("## The public names\n")[2].partition("\n## ")[0]
    groups = {
        row[0]: re.findall(r"`(\w+)`", row[1]) for row in re.findall(r"^\| (\w[^|]*) \| (.*) \|$", table, re.MULTILINE)
    }
    found = {}
    index = [
        "# The API",
        "",
        "What `tarshards` exports; anything else in its packages may change.",
        "",
        "| | |",
        "|---|---|",
    ]
    for group, names in groups.items():
        page = f"{group.replace(' ', '-')}.md"
        index.append(f"| [{group}]({page}) | {', '.join(f'[`{name}`]({page}#{path_of(name)})' for name in names)} |")
        parts = [f"# {group[0].upper()}{group[1:]}", f"{quoted(names)} of `tarshards`."]
        parts += [f"::: {path_of(name)}" for name in names]
        if group == "read":
            parts += ["::: tarshards.index.opening_options.Opening", "::: tarshards.epoch.epoch_options.EpochOptions"]
        found[f"reference/{page}"] = "\n\n".join(parts) + "\n"
    for page, modules in PACKAGES.items():
        names = [f"tarshards.{module}" for module in modules]
        index.append(f"| [{page}]({page}.md) | {quoted(names)} |")
        parts = [f"# {page[0].upper()}{page[1:]}", f"The public names of {quoted(names)}."]
        found[f"reference/{page}.md"] = "\n\n".join([*parts, *(f"::: {name}" for name in names)]) + "\n"
    return found | {"reference/index.md": "\n".join([*index, ""])}


def quoted(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def path_of(name: str) -> str:
    """Return the full name of a public name."""
    if module := tarshards._NAMESPACES.get(name):
        return f"tarshards.{module}"
    return f"tarshards.{tarshards._MODULE_OF[name]}.{name}"


class Page(HTMLParser):
    """What a built page links to, what it loads, and the ids in it."""

    def __init__(self, text: str):
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        elif tag == "link" and given.get("rel") in ("stylesheet", "icon") and "href" in given:
            self.loads.add(given["href"])
        self.loads |= {given[name].split()[0] for name in ("src", "srcset") if given.get(name)}


def check(site: Path) -> None:
    """Raise SiteError if a link of a built site leads nowhere, or a page loads something from elsewhere."""
    found = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    wrong = []
    for path, page in found.items():
        for link in sorted(page.links | page.loads):
            url = urlsplit(link)
            if url.scheme == "data" or (url.scheme and link not in page.loads):
                continue
            file = path if not url.path else Path(normpath(path.parent / unquote(url.path)))
            file = file / "index.html" if file.is_dir() else file
            is_there = not url.scheme and file.exists() and not url.path.startswith("/")
            if path.name == "404.html":  # which a server shows for any name
                continue
            if not is_there or (url.fragment and file in found and unquote(url.fragment) not in found[file].ids):
                wrong.append(f"{path.relative_to(site)}: {link}")
    if wrong:
        raise SiteError("\n".join([f"{site}: links to what is not there", *wrong]))


def check_headings(site: Path) -> None:
    """Raise SiteError unless each message has the heading to which tools lead."""
    names = {page for page, *_ in advice.headings()}
    ids = {name: Page((site / f"troubleshooting/{name}/index.html").read_text()).ids for name in names}
    wrong = [f"{page}: {message}" for page, _, message in advice.headings() if advice.anchor(message) not in ids[page]]
    if wrong:
        raise SiteError("\n".join([f"{site}: headings with other anchors", *wrong]))


def check_search(site: Path) -> None:
    """Raise SiteError unless the search of a site finds what SEARCHES says; node runs it, if it is installed."""
    node = shutil.which("node")
    if node is None:
        return
    (worker,) = site.glob("assets/javascripts/workers/search.*.js")
    command = [node, ROOT / "docs/ask_search.js", worker, site / "search.json", *SEARCHES]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    wrong = [f"{words}: {found[words]}, not {place}" for words, place in SEARCHES.items() if found[words] != place]
    if wrong:
        raise SiteError("\n".join([f"{site}: the search finds other pages first", *wrong]))


def add_text(site: Path) -> None:
    """Write the Markdown of each page beside the page, and llms.txt, which lists them as in the navigation."""
    for path in STAGED.rglob("*.md"):
        target = site / path.relative_to(STAGED)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(SHOWN.sub(lambda found: api_text.described(found[1]), path.read_text()))
    lines = ["# tarshards", "", f"> {setting('site_description')}", ""]
    for entry in setting("nav"):
        lines += listed(entry)
    (site / "llms.txt").write_text("\n".join([*lines, ""]))


def setting(name: str) -> Any:
    class Loader(yaml.SafeLoader):
        """Reads mkdocs.yml without the objects of Python that it may name."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    Loader.add_constructor("!ENV", lambda *_: None)
    return yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)[name]


def listed(entry: Any, depth: int = 2) -> list[str]:
    """Return the lines of llms.txt for an entry of the navigation."""
    title, content = next(iter(entry.items())) if isinstance(entry, dict) else ("", entry)
    if isinstance(content, list):
        return ["", f"{'#' * depth} {title}", "", *(line for each in content for line in listed(each, depth + 1))]
    text = (STAGED / content).read_text()
    title = title or re.search(r"^# (.+)$", text, re.MULTILINE)[1].replace("`", "")
    return [f"- [{title}]({content}): {summary(text)}"]


def summary(text: str) -> str:
    """Return the first sentence of a page."""
    paragraphs = (each for each in re.split(r"\n\s*\n", CODE.sub("", text)))
    first = next((each for each in paragraphs if re.match(r"[\w`*\[]", each.strip())), "")
    words = LINK.sub(r"\2", " ".join(first.split()))
    return re.split(r"(?<=[.:])\s", words)[0].rstrip(":")


def addresses() -> dict[str, str]:
    """Return the variables of mkdocs.yml: the name with the version, and where repository and site are, if known."""
    known = metadata("tarshards")
    urls = dict(each.split(", ", 1) for each in known.get_all("Project-URL", ()))
    found = {"DOCS_REPOSITORY": known.get("Home-page"), "DOCS_SITE": urls.get("Documentation")}
    return {"DOCS_NAME": f"tarshards {known['Version']}"} | {name: url for name, url in found.items() if url}


def check_addresses(site: Path, address: str | None) -> None:
    """Raise SiteError unless the pages and the sitemap of a built site name their *address*, or none without one."""
    wrong, pages = [], sorted(path.relative_to(site) for path in site.rglob("index.html"))
    for page in pages:
        told = re.findall(r'<link rel="canonical" href="([^"]*)"', (site / page).read_text())
        if told != ([f"{address}{page}".removesuffix("index.html")] if address else []):
            wrong.append(f"{page}: canonical {told}")
    sitemap = site / "sitemap.xml"
    listed = re.findall("<loc>(.*)</loc>", sitemap.read_text()) if sitemap.exists() else None
    if sorted(listed or ()) != sorted(f"{address}{page}".removesuffix("index.html") for page in pages if address):
        wrong.append(f"sitemap.xml: {listed}")
    if wrong or (listed is None) is bool(address):
        raise SiteError("\n".join([f"{site}: addresses that are wrong", *wrong]))


def main() -> None:
    stage()
    programs, known = Path(sys.executable).parent, addresses()
    # Without an address MkDocs, whose site nobody publishes, builds for another one, so that both ways are checked.
    other = {"DOCS_REPOSITORY": "https://github.com/owner/name", "DOCS_SITE": "https://owner.github.io/name/"} | known
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    for site, own, command in (
        (ROOT / "site", known, ["zensical", "build", "--clean", "--strict"]),
        (ROOT / "build/mkdocs", other, ["mkdocs", "build", "-q", "--clean", "--strict", "--site-dir", "build/mkdocs"]),
    ):
        subprocess.run([programs / command[0], *command[1:]], cwd=ROOT, env=environment | own, check=True)
        if "DOCS_SITE" not in own:
            (site / "sitemap.xml").unlink()  # which has no addresses
        check(site)
        check_headings(site)
        check_addresses(site, own.get("DOCS_SITE"))
    check_search(ROOT / "site")
    add_text(ROOT / "site")


if __name__ == "__main__":
    try:
        main()
    except (SiteError, subprocess.CalledProcessError) as error:
        sys.exit(f"docs: {error}")
