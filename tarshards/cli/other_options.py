"""The options that users of tar, grep, sort, split, head, xargs and parallel type, and what is theirs here.

Loaded when a tool meets an option that it does not have. An answer is given by a tool that has all options that the
answer names; other programs stand in backticks.
"""

from __future__ import annotations

from typing import NamedTuple


class Answer(NamedTuple):
    """What to type instead of *options* in *tools*, or in any tool if there are none; both separated by spaces."""

    tools: str
    options: str
    instead: str


ANSWERS = [
    # sort
    Answer("tarsort", "-n -g --numeric-sort --general-numeric-sort", "--sort FIELD:int, or :float, sorts by a number"),
    Answer("tarsort", "-V --version-sort --natural", "--sort FIELD:natural sorts numbers in texts by their values"),
    Answer("tarsort", "-k --key --by", "--sort FIELD sorts by a field"),
    Answer("tarsort", "-R --random-sort --random", "--shuffle gives a random order"),
    Answer("tarsort", "-u --uniq", "--unique first keeps one sample of each key"),
    Answer("tarsort", "-s --stable", "equal samples always keep their order"),
    Answer("tarsort", "-S --buffer-size", "-M SIZE limits the memory"),
    Answer("tarsort", "-C --check", "`tarcheck` checks shards"),
    # grep
    Answer("targrep", "-n -H -b --line-number --with-filename", "-l writes keys, and `| tarshow` shows what is found"),
    Answer("targrep", "-L --files-without-match", "-v -l writes the keys of the samples without a match"),
    Answer("targrep", "-x --line-regexp", "^ and $ in a pattern match at each line: '^text$'"),
    Answer(
        "targrep", "-P -G --perl-regexp --basic-regexp", "patterns are Python's regular expressions, or with -F text"
    ),
    Answer("targrep", "-r -R --recursive --include", "name the shards: 'FOLDER/**/*.tar'"),
    Answer("targrep", "-a -U --text --binary", "binary fields are searched too"),
    Answer("targrep", "-s --no-messages", "--on-error skip goes on after bad data"),
    Answer("targrep", "-A -B --context --only-matching", "whole samples are found; `| tar2tsv -f FIELD` shows a field"),
    # split
    Answer("tarsplit", "-l -N --lines --number", "-n N limits the samples of a shard"),
    Answer("tarsplit", "-b -C --bytes --line-bytes", "-s SIZE limits the bytes of a shard"),
    Answer(
        "tarsplit",
        "-a -d -x --suffix-length --numeric-suffixes --additional-suffix",
        "-o has the number and the suffix: -o out-%04d.tar",
    ),
    Answer("tarsplit", "--filter", "--post CMD runs a command for each finished shard"),
    Answer("tarsplit", "--shards --chunks --parts", "`tarreshard --shards N` writes N shards"),
    # xargs and parallel
    Answer("tarproc", "-0", "--null goes with -T, a list of shards"),
    Answer("tarproc", "-a --arg-file", "-T FILE reads the names of shards"),
    Answer("tarproc", "-I --replace", "-c CMD gets the fields as files sample.EXT, and the key as $TAR_KEY"),
    Answer("tarproc", "-n -L -l -N -m -X --max-args --max-lines", "a command runs for each sample"),
    Answer("tarproc", "-r --no-run-if-empty", "--allow-empty accepts shards without samples"),
    Answer("tarproc", "-k --keep-order", "results keep the order of the samples, unless --unordered"),
    Answer("tarproc", "-t --tag --tagstring --results", "--add-log EXT stores what a command prints"),
    Answer("tarproc", "--max-procs --jobs --workers", "-p N runs N commands at once"),
    Answer("tarjob", "-I --replace", "{} in the command is the item"),
    Answer("tarjob", "-a -0 --arg-file --null", "-s - reads items from stdin, one per line, and -s @FILE from a file"),
    Answer("tarjob", "-n -L -N --max-args --max-lines", "--group N runs N items in a task"),
    Answer("tarjob", "--max-procs --jobs --workers", "-j N runs N tasks at once"),
    Answer(
        "lines2tar", "-0 -z --null --zero-terminated", "lines end with a newline: `tr '\\0' '\\n'` makes such lines"
    ),
    # tar
    Answer("tarcreate", "-f --file", "-o FILE is the tar to write"),
    Answer("tarcreate", "-c --create", "`tarcreate --dir FOLDER` needs no such option"),
    Answer("tarcreate", "-T --files-from", "--lines FILE reads the names of files"),
    Answer("tarcreate", "-x --exclude -X", "--exts takes files with these extensions"),
    Answer("", "-t --list-contents", "`tarshow` lists samples, and `tar -tf` members"),
    Answer("", "-x --extract --get", "`tar -xf` extracts members, and `tarexport --format files` samples"),
    Answer("", "--exclude -X", "-f FIELDS takes some fields, and --where EXPR some samples"),
    Answer("", "--exclude -X", "-f FIELDS takes some fields"),
    Answer("", "-A -r -u --append --concatenate", "`tarcat A B -o C` joins tars, and tools only write new ones"),
    Answer("", "--delete", "`targrep -v` leaves samples out"),
    Answer(
        "",
        "-z -j -J -Z --gzip --bzip2 --xz --zstd --compress",
        "compressed shards are read as they are; to write one, pipe it into `gzip`",
    ),
    Answer("", "-v", "--verbose prints more, and `tarshow` lists samples"),
    Answer("", "-v --verbose", "`tarshow` lists samples"),
    Answer("", "-F", "-f FIELDS takes some fields, and `targrep -F` searches for text"),
    # head, and whatever is called differently elsewhere
    Answer(
        "targrep tarproc", "--lines --head --limit --max --take --max-samples", "--count N takes the first N samples"
    ),
    Answer("", "-n -N --lines --head --limit --max --take --max-samples", "-c N takes the first N samples"),
    Answer("", "--tail", "--slice takes some samples, and --skip N leaves the first out"),
    Answer("", "--force --clobber", "--overwrite replaces files"),
    Answer("tarindex", "--overwrite --force --update", "indexes that are missing or stale are written"),
    Answer("", "-p -P -w --jobs --workers --threads --num-workers --processes", "-j N runs N at once"),
    Answer("", "--out --outfile --dest --output-dir", "-o is the output"),
    Answer("", "--silent --no-progress", "-q shows no progress bar"),
    Answer("", "--input --file --shard --url", "shards are named without an option"),
    Answer("", "--no-color --colour --no-colour", "--color never turns colours off"),
]


def answer_to(tool: str, option: str, known: set[str]) -> str | None:
    """Return what to type instead of *option* in *tool*, whose options are *known*; None if nothing is known.

    >>> answer_to("tarsort", "-R", {"--shuffle"}), answer_to("tarsort", "-R", set())
    ('--shuffle gives a random order', None)
    """
    for answer in ANSWERS:
        if (
            tool in (answer.tools.split() or [tool])
            and option in answer.options.split()
            and options_of(answer.instead) <= known
        ):
            return answer.instead
    return None


def options_of(text: str) -> set[str]:
    """Return the options that *text* names, except for those of other programs, in backticks.

    >>> sorted(options_of("-c N, --count; `tar -x`, a-b 'x -y'"))
    ['--count', '-c', '-y']
    """
    import re

    return set(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", re.sub("`[^`]*`", "", text)))
