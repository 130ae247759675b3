"""Items and a command to tasks, and the URL of each item's marker; the same for every scheduler."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, dropwhile, pairwise, product
from typing import Any, NamedTuple

from tarshards.errors import OpenError, StateError, UrlError
from tarshards.storage.bash_line import fill_words
from tarshards.storage.code_digest import digest_module
from tarshards.storage.expressions import expand_urls
from tarshards.storage.location import Location
from tarshards.storage.markers import Provenance, digest_of

VERSION = 1
PLACEHOLDER = re.compile(r"(?<!\$)\{(?:(#)|(\d*)([./]?))\}")  # ${1} and ${#} are bash's
#: Our tools that replace a file only with --overwrite.
TOOLS = {
    *("lines2tar", "tar2json", "tar2tsv", "tarcard", "tarcat", "tarcheck", "tarconvert", "tarcreate", "tarexport"),
    *("tarfirst", "targrep", "tarimport", "tarmerge", "tarmix", "tarpcat", "tarproc", "tarreshard", "tarscat"),
    *("tarshow", "tarsort", "tarsplit", "tarview"),
}
EXPANDED = re.compile(r"[$`*?~]")  # what bash replaces
SCRIPT = re.compile(r"\.(py|sh|bash|pl|rb|R|jl|js|lua|awk|sed|jq)$")
LONGEST_SCRIPT = 1 << 20  # bytes that are compared
SPECIAL = "'"  # a value that no code can have without quotes
SLOTS = re.compile(r"\0(?:-[pPj]\0?|--parallel[=\0])(\d+)(?=\0)")  # in words that are separated by \0
NUMBERED = re.compile(r"%\d*d|\{shard")  # a pattern for several outputs, not one name


class Item(NamedTuple):
    """The unit of work: its number in the whole list, from 0, and one value per source."""

    number: int
    values: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """The values as markers record them: without the credentials of URLs."""
        return [Location(value).recorded if "://" in value else value for value in self.values]

    def redacted(self, text: str) -> str:
        """Return *text*, written by the command, without the credentials of URLs."""
        # At once, since one value's credentials may be part of another's.
        return Location("").redacted(text, [Location(value) for value in self.values if "://" in value])


class JobPlan(NamedTuple):
    """A command and its tasks, each of one or more items.

    Markers are written beside *output*, which has placeholders like the command, or in the folder *state*. *code* is a
    digest of the scripts that the command names, as they were when the plan was made.
    """

    name: str
    command: tuple[str, ...]
    output: str | None
    state: str | None
    tasks: tuple[tuple[Item, ...], ...]
    code: str = ""

    @property
    def items(self) -> list[Item]:
        """The items of all tasks."""
        return [item for task in self.tasks for item in task]

    def arguments(self, item: Item) -> list[str]:
        """Return the program to run for *item*, and its arguments.

        In a line of bash, an argument of a shell's -c too, each value remains one word. Raises ValueError for a value
        that would be parsed as code.
        """
        return fill_words(self._words, PLACEHOLDER, partial(value_of, item))

    def check_values(self) -> None:
        """Raise ValueError if the command cannot have the value of an item."""
        try:
            fill_words(self._words, PLACEHOLDER, lambda _: SPECIAL)
        except ValueError:  # of a place that takes plain values only
            for item in self.items:
                self.arguments(item)

    def output_of(self, item: Item) -> str | None:
        """Return the URL that the command writes for *item*, or None if it is unknown."""
        return None if self.output is None else fill(self.output, item)

    def local_output(self, item: Item) -> Location | None:
        """Return the local file that must exist for *item* to be done; None if its output is unknown or remote."""
        output = self.output_of(item)
        return Location.of(output) if output is not None and Location.of(output).is_local else None

    def lasting_outputs(self, item: Item) -> list[str]:
        """Return the URLs that must outlive the job: the output of *item*, and the outputs of a lone tool of ours.

        A line of bash may also write intermediate files.
        """
        words = [] if self.output is None else [self.output]
        if not self._is_line and any(map(_is_tool, self.command)):
            words += _outputs_in(self.command)
        return [fill(word, item) for word in dict.fromkeys(words)]

    def files_of(self, item: Item) -> dict[str, bool]:
        """Return the known output files of the command for *item*, each with whether a tool of ours writes it.

        They are its output, and the argument of each -o or --output; remote files are included only for our tools.
        """
        commands = self._commands
        found: dict[str, bool] = {}
        for words in commands:
            is_ours = any(map(_is_tool, words))
            for word in filter(_is_one_file, _outputs_in(words)):
                if not (self._is_line and EXPANDED.search(word)):
                    found[fill(word, item)] = is_ours
            if self.output is not None and (self.output in words or len(commands) == 1):
                found.setdefault(fill(self.output, item), is_ours)
        if self.output is not None:
            found.setdefault(fill(self.output, item), False)
        kept = {url: Location(url).scheme in ("", "file") for url in found if not Location(url).is_stream}
        return {url: found[url] for url, is_local in kept.items() if is_local or found[url]}

    def inputs_of(self, item: Item) -> dict[str, Any]:
        """Return the local files that the command for *item* names and does not write, each with its version."""
        words = [word for words in self._commands for word in words if PLACEHOLDER.search(word)]
        named = {fill(word, item) for word in words if not (self._is_line and EXPANDED.search(word))}
        named |= {name.partition("=")[2] for name in named if name.startswith("--")} | {*item.values}
        return _versions(named - {*self.files_of(item), self.output_of(item)})

    def is_done(self, item: Item, record: dict[str, Any] | None) -> bool:
        """Return whether a marker records that *item* is done, by the same code and with inputs as they are now.

        A marker of an earlier release records neither.
        """
        if record is None or not Provenance(self.digest(item)).is_of(record):
            return False
        code, inputs = record.get("code"), _versions(set(record.get("inputs", ())))
        is_same = not (self.code and code) or code == self.code
        return is_same and Provenance(self.digest(item), self.local_output(item), inputs=inputs).is_made(record)

    @property
    def cores(self) -> int | None:
        """The cores that our tools in the command use by -p, -P, -j or --parallel; None if no number is given.

        >>> make_plan(["tarcat {} | tarproc -p 16 -c run - -o s3://b/{}"], ["a"], state="s").cores
        16
        """
        numbers = [number for words in self._commands for number in _slots_of(words)]
        return max(numbers, default=0) or None

    @property
    def has_credentials(self) -> bool:
        """Whether a URL in the command or the items has credentials, which all who can read the plan would know."""
        texts = [*self.command, self.output or "", self.state or ""]
        return any(map(_has_credentials, chain(texts, (value for item in self.items for value in item.values))))

    @property
    def _commands(self) -> list[list[str]]:
        """The words of each program that the command runs."""
        return _commands(self.command[0]) if self._is_line else [list(self.command)]

    @property
    def _words(self) -> tuple[str, ...]:
        """The program to run and its arguments, with their placeholders."""
        return ("bash", "-c", *self.command) if self._is_line else self.command

    @property
    def _is_line(self) -> bool:
        """Whether the command is a line of bash, rather than a program and its arguments."""
        return len(self.command) == 1 and " " in self.command[0]

    def digest(self, item: Item) -> str:
        """Return the digest of item and command that a valid marker contains."""
        return digest_of(item.values, self.arguments(item))

    def marker(self, item: Item, kind: str = "done") -> str:
        """Return the URL of the ``done``, ``failed`` or ``started`` marker of *item*."""
        if self.state is not None:
            return f"{self.state.rstrip('/')}/{self.digest(item)}.{kind}"
        return Location(self.output_of(item) or "").sibling(f".{kind}").url

    def only(self, numbers: Iterable[int]) -> JobPlan:
        """Return the plan for the items with these numbers, without empty tasks."""
        wanted = set(numbers)
        tasks = (tuple(item for item in task if item.number in wanted) for task in self.tasks)
        return self._replace(tasks=tuple(task for task in tasks if task))

    def dumps(self) -> str:
        """Return the plan as JSON.

        >>> plan = make_plan(["cat", "{}"], ["{0..1}"], state="s")
        >>> JobPlan.loads(plan.dumps()) == plan
        True
        """
        tasks = [[[item.number, *item.values] for item in task] for task in self.tasks]
        head = {"format": "tarjob-plan", "version": VERSION, **self._asdict(), "tasks": None}
        for name in ["tasks"] if self.code else ["tasks", "code"]:  # an earlier release knows no code
            del head[name]
        lines = ",\n".join(json.dumps(task, separators=(",", ":")) for task in tasks)
        return f'{json.dumps(head)[:-1]}, "tasks": [\n{lines}\n]}}\n'

    @classmethod
    def loads(cls, text: str | bytes, *, url: str | None = None) -> JobPlan:
        """Parse the output of ``dumps``, or its bytes; raise StateError for anything else."""
        try:
            fields = json.loads(text if isinstance(text, str) else text.decode())
            if (fields.pop("format"), fields.pop("version")) != ("tarjob-plan", VERSION):
                raise ValueError("unknown format or version")
            tasks = [[Item(number, tuple(values)) for number, *values in task] for task in fields.pop("tasks")]
            command = tuple(fields.pop("command"))
            plan = cls(command=command, tasks=tuple(map(tuple, tasks)), **fields)
            _check_types(plan)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StateError(f"not a plan of tarjob: {error}", url=url) from error
        return plan


def fill(word: str, item: Item) -> str:
    """Fill an item's values into *word*.

    ``{}`` and ``{1}`` are the value of the first source, ``{2}`` that of the second; ``{.}`` and ``{2.}`` are without
    the extension (``.tar.gz`` is one), ``{/}`` and ``{2/}`` the base name; ``{#}`` is the item's number, from 1.

    >>> fill("{} {.} {/} {#} {2} {shard:06d}", Item(0, ("d/a.tar.gz", "x")))
    'd/a.tar.gz d/a a.tar.gz 1 x {shard:06d}'
    """
    return PLACEHOLDER.sub(partial(value_of, item), word)


def value_of(item: Item, placeholder: re.Match[str]) -> str:
    """Return the value of *item* that replaces *placeholder*."""
    count, source, change = placeholder.groups()
    if count:
        return str(item.number + 1)
    text = item.values[int(source or 1) - 1]
    if change == ".":
        return re.sub(r"(\.tar\.\w+|\.[^./]+)$", "", text)
    if change != "/":
        return text
    name, before = text.rpartition("/")[2], placeholder.string[: placeholder.start()]
    is_word = not before or before[-1] in " \t\n='\""
    return f"./{name}" if is_word and name.lower().startswith("pipe:") else name  # a file, no command


def make_plan(
    command: Sequence[str],
    sources: Sequence[str | Sequence[str]] = (),
    *,
    zipped: bool = False,
    inputs: Any = None,
    outputs: Any = None,
    state: str | None = None,
    name: str | None = None,
) -> JobPlan:
    """Return the plan of *command* for the product of *sources*, or for their pairs if *zipped*.

    Each source is an expression like those of shards. *inputs* and *outputs* are expressions of the same length
    instead, for ``{1}`` and ``{2}``; the markers are then written beside the outputs, else in the folder *state*, or
    beside the argument of ``-o`` in the command. Raises ValueError if two items would write the same output, and for an
    item that bash or another program would parse as code.
    """
    if (inputs is None) != (outputs is None) or (inputs is not None) == bool(sources):
        raise ValueError("give the items either by sources or by inputs and outputs")
    lists = [expand_urls(spec) for spec in (sources or [inputs, outputs])]
    zipped = zipped or not sources
    if zipped and len({len(values) for values in lists}) > 1:
        raise ValueError(f"lists of {' and '.join(str(len(values)) for values in lists)} items cannot be paired")
    command = tuple(command)
    _check_placeholders(command, len(lists))
    items = [Item(number, tuple(values)) for number, values in enumerate(zip(*lists) if zipped else product(*lists))]
    output = "{2}" if outputs is not None else None
    if output is None and state is None:
        output = next((word for word in _outputs_in(command)[-1:] if _is_one_file(word)), None)
    name = name or f"{_program(command)}-{digest_of(command, lists)[:8]}"
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
        raise ValueError(f"{name!r} is not a job name: up to 40 of a-z, 0-9 and inner -, the first a letter")
    plan = JobPlan(name, command, output, state, tuple((item,) for item in items))
    plan = plan._replace(code=_code_of(plan._commands))
    plan.check_values()
    if output is not None or state is not None:
        check_markers(plan)
    return plan


def check_markers(plan: JobPlan) -> None:
    """Raise ValueError if two items have the same marker, since one would mark the other as done."""
    marker, count = Counter(map(plan.marker, plan.items)).most_common(1)[0]
    if count > 1:
        if plan.output is None:
            raise ValueError(f"{count} items have the same command")
        raise ValueError(f"{count} items would write {Location(marker.removesuffix('.done')).name}")


def _check_types(plan: JobPlan) -> None:
    """Raise TypeError or ValueError for anything that ``dumps`` never writes."""
    texts = [plan.name, plan.code, *plan.command, *(word for word in (plan.output, plan.state) if word is not None)]
    texts += [value for item in plan.items for value in item.values]
    items = all(type(item.number) is int and item.values for item in plan.items)
    if not items or not all(isinstance(text, str) for text in texts):
        raise TypeError("a word is not a str, or an item has no number or value")
    for sources in {len(item.values) for item in plan.items}:
        _check_placeholders((*plan.command, plan.output or ""), sources)
    plan.check_values()  # an earlier version may have written it


def _check_placeholders(command: tuple[str, ...], sources: int) -> None:
    if not command:
        raise ValueError("no command given; write it after --")
    found = [match for word in command for match in PLACEHOLDER.finditer(word)]
    if not found:
        raise ValueError("the command has no {}: it would be the same for every item")
    for match in found:
        if match[2] and not 1 <= int(match[2]) <= sources:
            raise ValueError(f"{match[0]}: only {sources} lists of items are given")


def _outputs_in(words: Sequence[str]) -> list[str]:
    """Return the argument of each -o or --output."""
    found = [after for word, after in pairwise(words) if word in ("-o", "--output")]
    return found + [word.removeprefix("--output=") for word in words if word.startswith("--output=")]


def _has_credentials(text: str) -> bool:
    """Return whether a URL in *text*, a command, has credentials; the names of shell variables are none.

    >>> _has_credentials("curl 'http://me:secret@host/a.tar'"), _has_credentials("curl http://$LOGIN@host/a.tar?sig=$SIG")
    (True, False)
    """
    if "://" not in text or ("@" not in text and "?" not in text):
        return False
    for url in re.findall(r"\b\w+://[^\s'\"]+", re.sub(r"\$(\w+|\{\w+\})", "", text)):
        url = re.sub(r"^(?!https?:)\w+", "s3", url, flags=re.IGNORECASE)  # the program may know schemes that we do not
        bare = re.sub(r"(?<=://):?@|(?<=[?&])[^=&]+=(&|$)", "", url).rstrip("?&")
        if Location(bare).recorded != bare:
            return True
    return False


def _is_tool(word: str) -> bool:
    return os.path.basename(word) in TOOLS


def _versions(names: set[Any]) -> dict[str, Any]:
    """Return the versions of those *names* that are local files."""
    found: dict[str, Any] = {}
    for location in map(Location, sorted(name for name in names if isinstance(name, str) and os.path.isfile(name))):
        with suppress(OpenError):  # removed just now
            found |= {location.name: location.version()} if location.path is not None else {}
    return found


def _code_of(commands: Iterable[Sequence[str]]) -> str:
    """Return a digest of the scripts and Python modules in commands, empty if there are none."""
    found: dict[str, str] = {}
    for words in commands:
        for before, word in pairwise(["", *words]):
            option, _, value = word.rpartition("=") if word.startswith("--") else (before, "", word)
            if PLACEHOLDER.search(value):
                continue
            is_module = option in ("--python", "-m")
            name = value.partition(":")[0] if is_module else value
            most = -1 if is_module else LONGEST_SCRIPT
            if (is_module or name.endswith(".py")) and (code := digest_module(name, most)):
                found[value] = code
            elif option == "--script" or "/" in value or SCRIPT.search(value):
                with suppress(OSError), open(value, "rb") as file:
                    text = file.read(LONGEST_SCRIPT) if os.path.isfile(value) else b""
                    if SCRIPT.search(value) or option == "--script" or text.startswith(b"#!"):
                        found[value] = digest_of(text.hex())
    return digest_of(found) if found else ""


def _slots_of(words: list[str]) -> list[int]:
    """Return the last number of -p, -P, -j or --parallel after the name of a tool of ours, or nothing."""
    options = dropwhile(lambda word: not _is_tool(word), words)
    return [int(number) for number in SLOTS.findall("\0".join([*options, ""]))][-1:]


def _is_one_file(word: str) -> bool:
    """Whether *word* names one file per item."""
    return bool(PLACEHOLDER.search(word)) and not NUMBERED.search(word)


def _commands(line: str) -> list[list[str]]:
    """Return the words of each command of a line of bash, none if it cannot be parsed.

    >>> _commands("tarcat {} -o 'out-{}.tar'; true")
    [['tarcat', '{}', '-o', 'out-{}.tar'], ['true']]
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    commands: list[list[str]] = [[]]
    try:
        for word in lexer:
            if set(word) <= set("();&|"):
                commands.append([])
            else:
                commands[-1].append(word)
    except ValueError:
        return []
    return list(filter(None, commands))


def _program(command: tuple[str, ...]) -> str:
    word = os.path.basename(command[0].split()[0])
    return re.sub("[^a-z0-9]+", "-", word.lower()).strip("-0123456789")[:24].rstrip("-") or "job"


def group_tasks(
    plan: JobPlan, *, count: int | None = None, size: int | None = None, sizes: Sequence[int | None] = ()
) -> JobPlan:
    """Return the plan with *count* items or about *size* bytes per task, balanced by *sizes* if all are known.

    >>> plan = make_plan(["cat", "{}"], ["{a,b,c,d}"], state="s")
    >>> [[item.values[0] for item in task] for task in group_tasks(plan, size=10, sizes=[9, 1, 2, 7]).tasks]
    [['a', 'b'], ['c', 'd']]
    """
    items = plan.items
    known = [value for value in sizes if value is not None]
    if len(known) < len(items):
        if size is not None:
            raise UrlError("the sizes of the items are unknown; group them by a number")
        step = count or 1
        return plan._replace(tasks=tuple(tuple(items[i : i + step]) for i in range(0, len(items), step)))
    number = -(-len(items) // count) if count else max(1, -(-sum(known) // (size or 1)))
    return plan._replace(tasks=_balanced(items, known, min(number, len(items)), count or len(items)))


def _balanced(items: list[Item], sizes: list[int], number: int, most: int) -> tuple[tuple[Item, ...], ...]:
    """Assign the items, largest first, each to the smallest of *number* tasks that has fewer than *most* items."""
    import heapq

    tasks: list[list[Item]] = [[] for _ in range(number)]
    weights = [(0, index) for index in range(number)]
    for size, item in sorted(zip(sizes, items), key=lambda pair: (-pair[0], pair[1].number)):
        weight, index = heapq.heappop(weights)
        tasks[index].append(item)
        if len(tasks[index]) < most:
            heapq.heappush(weights, (weight + size, index))
    return tuple(sorted(tuple(sorted(task)) for task in tasks if task))
