"""What bash reads where a name replaced a placeholder: exactly the name."""

from __future__ import annotations

import os
import re
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarshards.storage.bash_line import fill_line

BRACES = re.compile(r"(?<!\$)\{\}")
HOSTILE = [
    *("a b.tar", "it's.tar", '"q".tar', "a\nb.tar", "back\\slash.tar", "ends\\", "$HOME.tar", "`touch hit`.tar"),
    *("$(touch hit).tar", "';touch hit;'", '";touch hit;"', "x;touch hit", "a&b|c>d<e", "*", "?[a-z]", "~", "~root"),
    *("a=b", "a,b", "{a,b}", "{1..3}", "!!", "#no", "-n", "(a)", ")", "}", "é.tar", "\udcff.tar", "7"),
    "\nE\ntouch hit\n",
]
NAMES = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(st.sampled_from("\"'\\$`!*?[]{}()#&;|<>~=,.^% \t\n-aé09E"), min_size=1, max_size=8),
)
SHOW = "show() { printf '%s\\0' \"$@\"; }; "


def filled(line: str, name: str) -> str:
    return fill_line(line, BRACES, lambda match: name)


def run(line: str, folder: str | Path = "/") -> bytes:
    environment = {"PATH": os.environ["PATH"], "HOME": "/home", "FUNCNEST": "9", "LC_ALL": "C.UTF-8"}
    command = ["bash", "-c", os.fsencode(line)]
    return subprocess.run(command, capture_output=True, env=environment, cwd=folder, timeout=60).stdout


def shown(line: str, name: str) -> list[str]:
    """The arguments that ``show`` has in *line*, filled with *name*."""
    return [os.fsdecode(part) for part in run(SHOW + filled(line, name)).split(b"\0")[:-1]]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_one_word_in_every_kind_of_quotes(name):
    words = ["{}", "'{}'", '"{}"', "$'{}'", "x/{}", "'x/{}'", '"x/{}"', "\"$(printf %s. '{}')\""]
    words += ['"$(printf %s. "$(printf %s {}; printf .)")"', '"a$"{}']
    whole = [name, name, name, name, f"x/{name}", f"x/{name}", f"x/{name}", f"{name}.", f"{name}..", f"a${name}"]
    assert shown(f"show {' '.join(words)} # {{}}\ntrue; show {{}}", name) == [*whole, name]


@pytest.mark.parametrize(
    ("line", "name", "words"),
    [
        ("show {x,{}}", "a,b", ["x", "a,b"]),
        ("show {{}}", "1..3", ["{1..3}"]),
        ("show {}>&1", "7", ["7"]),
        ("show 1{}>&1", "2", ["12"]),
        ("show $'{}' $\"{}\" \"$'{}'\"", "é'", ["é'", "é'", "$'é''"]),
        ("show ${1}a ${#} '${1}' {}", "x", ["a", "0", "${1}", "x"]),
        ('name={}; show `printf %s "$name"` "${name%.tar}"; cat <<E\n$name\\0\nE\n', "`a`.tar", ["`a`.tar", "`a`"]),
    ],
)
def test_a_plain_value_is_quoted_where_bash_would_expand_it(line, name, words):
    assert shown(line, name)[: len(words)] == words


def test_an_assignment_is_a_command_where_it_replaces_one():
    assert filled("{} --help", "a=b") == "'a=b' --help"


@st.composite
def words(draw: st.DrawFn, depth: int = 2) -> tuple[str, list[str | None]]:
    """A word of bash, and its text in parts; None stands for the name."""
    template, text = "", []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["{}", "{}", "a", '\\"', "'", '"', "$'", "$("][: 8 if depth else 7]))
        inner = draw(st.lists(st.sampled_from(["{}", "{}", "b", " ", ";", "#", "(", ")"]), max_size=3))
        if kind in ("'", '"', "$'"):
            template += kind + "".join(inner) + kind[-1]
            text += [None if part == "{}" else part for part in inner]
        elif kind == "$(":
            word, parts = draw(words(depth - 1))
            template += f'"$(printf %s. {word})"'
            text += [*parts, "."]
        else:
            template += kind
            text += [None if kind == "{}" else kind.strip("\\")]
    return template, text


FRAMES = [
    *("{};{}", "( {} ); {}", "{ {}; }\n{}", "if true; then {}; fi; {}", "for i in 1 ; do {}; done && {}"),
    *("case x in a) :;; x) {};; esac; {}", ": ${x:-y} $((1+(2))) $$; {}; {}", "{} # it's\n{}", "{} | cat; {}"),
    *("f() { {}; }; f; {}", "x=(a 'b'); {}; {}", "[[ a == b ]] || {}; {}", "{} 2>&1 </dev/null; {}", "{} \\\n b; {}"),
    "{}; cat <<E | {}\nit's $x\nE",
    *("cat <<-'E' >/dev/null; {}\n\t\"\n\tE\n{}", 'cat <<<"\'" >/dev/null; {}; {}', '{}; : `echo "a\'b"`; {}'),
]


@given(st.sampled_from(FRAMES), st.lists(words(), min_size=1, max_size=3), NAMES)
def test_every_place_for_a_name_gives_exactly_the_name(frame, words, name):
    command = f"show {' '.join(template for template, _ in words)}"
    line = frame.replace("{}", "\0").replace("\0", command)
    whole = ["".join(name if part is None else part for part in text) for _, text in words]
    extra = ["b"] if "\\\n" in frame else []
    assert shown(line, name) == [*whole, *extra, *whole]


ATOMS = ["'", '"', "$'", '$"', "`", "$(", "$((", "))", ")", "(", "${x:-", "${x#", "${1}", "}", "\\", " ", "\n", ";"]
ATOMS += ["#", "<<E\n", "<<'E'\n", "E\n", "<<<", "<", "a", "{}", "{}", "{}", "case a in ", " esac ", "a)", "printf %s "]
ATOMS += ["<(", "[[ a == ", " ]] ", "((", "$[", "]", "=", "\\\n", "{", ","]


@given(st.lists(st.sampled_from(ATOMS), min_size=1, max_size=14), st.sampled_from([n for n in HOSTILE if "hit" in n]))
def test_in_no_line_a_name_becomes_a_command(tmp_path_factory, atoms, name):
    folder = tmp_path_factory.getbasetemp()
    line = "".join(atoms)
    with suppress(ValueError):
        run(filled(line, name), folder)
        assert not (folder / "hit").exists()
