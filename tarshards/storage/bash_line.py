r"""Fill values into a line of bash, each quoted for the place where it stands, so that it remains one word.

The line is read once: outside quotes, within ``'...'``, ``"..."``, ``$'...'`` and ``$(...)``, also nested, every value
has a form that bash reads as exactly that value. Elsewhere (``${...}``, ``$((...))``, backquotes, here-documents, code
that another program parses) only values without special characters are filled in.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from shlex import quote
from typing import NamedTuple

from tarshards.storage.location import Location

#: How a quoted text ends and begins again around a value.
AROUND = {"'": ("'", "'"), '"': ('"', '"'), "$'": ("'", "$'")}
HEREDOC = re.compile(r"""<<(-?)[ \t]*((?:'[^'\n]*'|"[^"$`\\\n]*"|\\[^\n]|[^\s;&|()<>'"\\`$])+)""")
SHELL = re.compile(r"(ba|da|a|k|z)?sh|su|runuser")
INTERPRETER = re.compile(r"(fish|python|pypy|perl|ruby|node|php|lua|Rscript)[\d.]*")
EVALUATORS = {"eval", "let", "trap", "ssh", "rsh"}  # they parse all of their arguments
EDITORS = {"awk", "gawk", "mawk", "nawk", "sed"}  # their first argument is a program
OUR_LINES = {("tarproc", "-c"), ("tarproc", "--command"), ("tarproc", "--server"), ("tarsplit", "--post")}


class Blank(NamedTuple):
    """A placeholder in a line.

    *place* is the kind of quotes around it, or ``#`` in a comment; a value that matches *risk* is always quoted.
    Only a plain value can be filled in if there is a *refusal*.
    """

    match: re.Match[str]
    place: str = ""
    risk: str | None = None
    refusal: str | None = None

    def filled(self, value: str) -> str:
        """Return the text for *value*; raise ValueError if no text would be read as this value here."""
        quoted = quote(value)
        if quoted == value and not (self.risk and re.search(self.risk, value)):
            return value
        if self.refusal is not None:
            name = Location(value).name if "://" in value else value  # without credentials
            raise ValueError(f"{name!r} cannot replace {self.match[0]} {self.refusal}")
        if self.place == "#":
            return quoted.replace("\n", " ")
        end, begin = AROUND.get(self.place, ("", ""))
        return f"{end}{quoted if quoted != value else repr(value)}{begin}"


def fill_line(line: str, placeholder: re.Pattern[str], value: Callable[[re.Match[str]], str]) -> str:
    r"""Replace each match of *placeholder* in a line of bash by its *value*, quoted where it is needed.

    Raises ValueError for a value that cannot be quoted at its place.

    >>> braces = re.compile(r"(?<!\$)\{\}")
    >>> for name in "a.tar", "it's $(x).tar":
    ...     print(fill_line('test -f "in/{}" && cat {} # ${1}', braces, lambda match: name))
    test -f "in/a.tar" && cat a.tar # ${1}
    test -f "in/"'it'"'"'s $(x).tar'"" && cat 'it'"'"'s $(x).tar' # ${1}
    """
    parts = split_line(line, placeholder)
    return "".join(part.filled(value(part.match)) if isinstance(part, Blank) else part for part in parts)


def fill_words(
    words: tuple[str, ...], placeholder: re.Pattern[str], value: Callable[[re.Match[str]], str]
) -> list[str]:
    """Replace each match of *placeholder* in the *words* of a command by its *value*, quoted in words that are code.

    Raises ValueError for a value that cannot be quoted where it stands, or not in code of another program than a shell.

    >>> fill_words(("sh", "-c", "wc {}", "{}"), re.compile("{}"), lambda match: "a b")
    ['sh', '-c', "wc 'a b'", 'a b']
    """
    return [
        placeholder.sub(value, word) if parser is None else _fill_code(word, parser, placeholder, value)
        for word, parser in zip(words, _parsers_of(words, placeholder))
    ]


@lru_cache(16)
def _parsers_of(words: tuple[str, ...], placeholder: re.Pattern[str]) -> tuple[tuple[str, bool] | None, ...]:
    """Return the ``parser_of`` each word of a command that has a *placeholder*, None for the others."""
    found = (parser_of(words[:number], word) for number, word in enumerate(words))
    return tuple(parser if placeholder.search(word) else None for parser, word in zip(found, words))


def _fill_code(
    word: str, parser: tuple[str, bool], placeholder: re.Pattern[str], value: Callable[[re.Match[str]], str]
) -> str:
    program, is_line = parser
    if is_line:
        return fill_line(word, placeholder, value)
    return placeholder.sub(
        lambda match: Blank(match, refusal=code_refusal(program, match[0])).filled(value(match)), word
    )


@lru_cache(16)
def split_line(line: str, placeholder: re.Pattern[str]) -> tuple[str | Blank, ...]:
    """Return the texts of a line of bash and the placeholders between them."""
    reader = _LineReader(line, placeholder)
    reader.commands([])
    parts = [*reader.parts, line[reader.done :]]
    if reader.open:  # a quote that does not end, or was taken for one
        return tuple(
            part._replace(refusal=_with_cure(part, f"after {reader.open}")) if isinstance(part, Blank) else part
            for part in parts
        )
    return tuple(parts)


def parser_of(words: Sequence[str], begun: str = "") -> tuple[str, bool] | None:
    """Return the program that parses the word after *words* as code, and whether as a line of bash or sh.

    That word has *begun* with this text, which may be an option or ``pipe:``.

    >>> parser_of(["timeout", "9", "/bin/bash", "-ec"]), parser_of(["python3", "-c"]), parser_of(["wc", "-c"])
    (('bash', True), ('python3', False), None)
    """
    words = [*words, *re.findall(r"^(--[\w-]+)=", begun)]
    if re.match(r"(--[\w-]+=)?pipe:", begun, re.IGNORECASE):
        return "pipe:", True
    for number, word in enumerate(words):
        program, rest = os.path.basename(word), words[number + 1 :]
        if program in EVALUATORS:
            return program, False
        if program in EDITORS and all(text[:1] == "-" or before in ("-v", "-F") for before, text in zip(words, rest)):
            return program, False
        if not rest:
            return None
        if (program, rest[-1]) in OUR_LINES or (SHELL.fullmatch(program) and re.fullmatch(r"-[A-Za-z]*c", rest[-1])):
            return program, True
        if INTERPRETER.fullmatch(program) and re.fullmatch(r"-[A-Za-z]*[ceErR]|--eval|--print", rest[-1]):
            return program, False
    return None


def code_refusal(program: str, placeholder: str) -> str:
    """Return why a *placeholder* that *program* parses as code can have only plain values."""
    cure = f'"$(printf %q {placeholder})" in a line of bash'
    return f"in code for {program}: pass {placeholder} to it as a separate argument, or write {cure}"


def _with_cure(blank: Blank, where: str) -> str:
    return f'{where}: begin the line with name={blank.match[0]}; and write "$name" there'


class _LineReader:
    """Reads a line of bash from ``at`` on; ``parts`` has what ends before ``done``."""

    def __init__(self, line: str, placeholder: re.Pattern[str]):
        self.line, self.placeholder = line, placeholder
        self.at = self.done = 0
        self.parts: list[str | Blank] = []
        self.word_at = 0  # where the current word begins
        self.lost = ""  # after this, it is unknown which quotes are open
        self.open = ""  # this has no end

    def blank(
        self,
        place: str = "",
        *,
        words: Sequence[str] = (),
        risk: str | None = None,
        within: str = "",
    ) -> str:
        """Take the placeholder that begins here, if one does, and return its text."""
        match = self.placeholder.match(self.line, self.at)
        if match is None:
            return ""
        blank = Blank(match, place, risk)
        if within or self.lost:
            blank = blank._replace(refusal=_with_cure(blank, within or f"after {self.lost}"))
        elif parser := parser_of(words, re.sub(r"\$?['\"\\]", "", self.line[self.word_at : self.at])):
            blank = blank._replace(refusal=code_refusal(parser[0], match[0]))
        self.parts += [self.line[self.done : self.at], blank]
        self.at = self.done = match.end()
        return match[0]

    def risk(self, words: Sequence[str], word: str) -> str | None:
        """Return a pattern of the plain values that bash would take for more than a word after *words* and *word*."""
        following = self.placeholder.match(self.line, self.at)
        if following is None:
            return None
        if "{" in word:
            return r",|\.\."  # a brace expansion
        if self.line[following.end() : following.end() + 1] in {"<", ">"} and (not word or word.isdigit()):
            return r"\A\d+\Z"  # the number of a descriptor
        return None if words or word else "="  # an assignment

    def is_at(self, text: str) -> bool:
        return self.line.startswith(text, self.at)

    def lose(self, where: str) -> None:
        self.lost = self.lost or where

    def escape(self) -> str:
        """Take a backslash and what it escapes."""
        self.at += 1
        if self.blank(within="after a backslash"):
            return ""
        self.at += 1
        return self.line[self.at - 1 : self.at]

    def commands(self, words: list[str], *, end: str = "") -> None:
        """Read commands up to the parenthesis *end*, or to the end of the line."""
        line, word, begun, depth = self.line, "", False, 0
        heredocs: list[tuple[str, bool]] = []

        def finish_word() -> None:
            nonlocal word, begun
            if begun:
                words.append(word)
                if end and word == "case":
                    self.lose("a case within $(...)")
            word, begun = "", False

        while self.at < len(line):
            begin, char = self.at, line[self.at]
            if char not in " \t\n;&|()<>":
                if not begun:
                    self.word_at = begin
                if text := self.blank(words=words, risk=self.risk(words, word)):
                    word, begun = word + text, True
                    continue
                if char == "#" and not begun:
                    self.comment()
                    continue
                begun = True
                if char == "\\":
                    if is_joined := self.is_at("\\\n"):
                        begun = bool(word)
                        if line[begin - 1 : begin].strip():
                            self.lose("a word that is continued on the next line")
                    word += "" if (text := self.escape()) == "\n" or is_joined else text
                elif char in "'\"`$":
                    self.quoted(words)
                    word += line[begin : self.at].strip("\"'$")
                else:
                    word, self.at = word + char, self.at + 1
                continue
            if char in "<>":
                finish_word()
                if self.is_at("<<") and not self.is_at("<<<"):
                    self.heredoc(heredocs)
                elif line[self.at + 1 : self.at + 2] == "(":
                    self.at += 2
                    self.commands([], end=")")
                else:
                    self.at += 3 if self.is_at("<<<") else 1
                continue
            finish_word()
            self.at += 1
            if char in " \t":
                continue
            words.clear()
            if char == "\n":
                self.bodies(heredocs)
            elif char == "(":
                depth += 1
                if line[begin - 1 : begin] in {*"?*+@!("}:
                    self.lose(line[begin - 1 : begin + 1])
            elif char == ")" and end:
                if depth == 0:
                    if heredocs:
                        self.lose("<< within $(...)")
                    return
                depth -= 1
        finish_word()
        if end:
            self.open = "$( without )"

    def quoted(self, words: Sequence[str]) -> None:
        """Read what begins with a quote, a backquote or a dollar sign."""
        char = self.line[self.at]
        if char == "'" or self.is_at("$'"):
            self.single("'" if char == "'" else "$'", words)
        elif char == '"' or self.is_at('$"'):
            self.at += 1 + (char == "$")
            self.double(words)
        elif char == "`":
            self.backquotes()
        else:
            self.dollar()

    def single(self, place: str, words: Sequence[str]) -> None:
        self.at += len(place)
        while self.at < len(self.line):
            if self.blank(place, words=words):
                continue
            if self.is_at("'"):
                self.at += 1
                return
            if place == "$'" and self.is_at("\\"):
                self.escape()
            else:
                self.at += 1
        self.open = f"{place} without an end"

    def double(self, words: Sequence[str]) -> None:
        while self.at < len(self.line):
            if self.blank('"', words=words):
                continue
            char = self.line[self.at]
            if char == '"':
                self.at += 1
                return
            if char == "\\":
                self.escape()
            elif char == "`":
                self.backquotes()
            elif char == "$":
                self.dollar()
            else:
                self.at += 1
        self.open = '" without an end'

    def dollar(self) -> None:
        word_at = self.word_at
        if self.is_at("$(("):
            self.enclosed("$((", "(", ")", 2)
        elif self.is_at("$("):
            self.at += 2
            self.commands([], end=")")
            self.word_at = word_at
        elif self.is_at("${"):
            self.enclosed("${", "{", "}", 1)
        elif self.is_at("$["):
            self.lose("$[...]")
            self.at += 2
        else:
            self.at += 2 if self.line[self.at + 1 : self.at + 2] in {*"$#!?*@-_"} else 1

    def enclosed(self, begin: str, opening: str, closing: str, depth: int) -> None:
        """Read an expansion that begins with *begin*, in which quotes follow other rules."""
        name = f"{begin}...{closing * depth}"
        self.at += len(begin)
        while self.at < len(self.line):
            if self.blank(within=f"in {name}"):
                continue
            char = self.line[self.at]
            self.at += 1
            if char in "'\"`\\" or (char == "$" and self.is_at("(") and opening == "{"):
                self.lose(f"quotes in {name}")
                return
            depth += (char == opening) - (char == closing)
            if depth == 0:
                return
        self.open = f"{begin} without an end"

    def backquotes(self) -> None:
        self.at += 1
        while self.at < len(self.line):
            if self.blank(within="in backquotes"):
                continue
            if self.is_at("`"):
                self.at += 1
                return
            if self.is_at("\\"):
                self.escape()
            else:
                self.at += 1
        self.open = "` without an end"

    def comment(self) -> None:
        while self.at < len(self.line) and self.line[self.at] != "\n":
            if not self.blank("#"):
                self.at += 1

    def heredoc(self, heredocs: list[tuple[str, bool]]) -> None:
        """Read ``<<`` and the word that ends the here-document."""
        match = HEREDOC.match(self.line, self.at)
        if match is None or self.placeholder.search(match[2]):
            self.lose("<<")
            self.at += 2
            return
        heredocs.append((re.sub(r"\\(.)|['\"]", r"\1", match[2]), match[1] == "-"))
        self.at = match.end()

    def bodies(self, heredocs: list[tuple[str, bool]]) -> None:
        """Read the here-documents that begin on this line."""
        for delimiter, is_indented in heredocs:
            while self.at < len(self.line):
                end = self.line.find("\n", self.at)
                end = len(self.line) if end < 0 else end
                text = self.line[self.at : end]
                text = text.lstrip("\t") if is_indented else text
                if text == delimiter:
                    self.at = end + 1
                    break
                risk = rf"\A{re.escape(delimiter)}\Z" if self.placeholder.fullmatch(text) else None
                while self.at < end:
                    if not self.blank(within="in a here-document", risk=risk):
                        self.at += 1
                self.at = end + 1
        heredocs.clear()
