"""The options that users of tar, grep, sort, split, head, xargs and parallel type, and what is theirs here.

Loaded when a tool meets an option that it does not have. An answer is given by a tool that has all options that the
answer names; other programs stand in backticks.
"""

from __future__ import annotations

from typing import NamedTuple


class OptionAnswer(NamedTuple):
    """What to type instead of *options* in *tools*, or in any tool if there are none; both separated by spaces."""

    tools: str
    options: str
    instead: str


ANSWERS = [
    # sort
    OptionAnswer(
        "tarsort", "-n -g --numeric-sort --general-numeric-sort", "--sort FIELD:int, or :float, sorts by a number"
    ),
    OptionAnswer(
        "tarsort", "-V --version-sort --natural", "--sort FIELD:natural sorts numbers in texts by their values"
    ),
    OptionAnswer("tarsort", "-k --key --by", "--sort FIELD sorts by a field"),
    OptionAnswer("tarsort", "-R --random-sort --random", "--shuffle gives a random order"),
    OptionAnswer("tarsort", "-u --uniq", "--unique first keeps one sample of each key"),
    OptionAnswer("tarsort", "-s --stable", "equal samples always keep their order"),
    OptionAnswer("tarsort", "-S --buffer-size", "-M SIZE limits the memory"),
    OptionAnswer("tarsort", "-C --check", "`tarcheck` checks shards"),
    # grep
    OptionAnswer(
        "targrep", "-n -H -b --line-number --with-filename", "-l writes keys, and `| tarshow` shows what is found"
    ),
    OptionAnswer("targrep", "-L --files-without-match", "-v -l writes the keys of the samples without a match"),
    OptionAnswer("targrep", "-x --line-regexp", "^ and $ in a pattern match at each line: '^text$'"),
    OptionAnswer(
        "targrep",
        "-P -G --perl-regexp --basic-regexp",
        "patterns are Python's regular expressions; -F takes plain text",
    ),
    OptionAnswer("targrep", "-r -R --recursive --include", "name the shards: 'FOLDER/**/*.tar'"),
    OptionAnswer("targrep", "-a -U --text --binary", "binary fields are searched too"),
    OptionAnswer("targrep", "-s --no-messages", "--on-error skip goes on after bad data"),
    OptionAnswer(
        "targrep", "-A -B --context --only-matching", "whole samples are found; `| tar2tsv -f FIELD` shows a field"
    ),
    # split
    OptionAnswer("tarsplit", "-l -N --lines --number --max-samples", "-n N limits the samples of a shard"),
    OptionAnswer("tarsplit", "-b -C --bytes --line-bytes", "-s SIZE limits the bytes of a shard"),
    OptionAnswer(
        "tarsplit",
        "-a -d -x --suffix-length --numeric-suffixes --additional-suffix",
        "-o has the number and the suffix: -o out-%04d.tar",
    ),
    OptionAnswer("tarsplit", "--filter", "--post CMD runs a command for each finished shard"),
    OptionAnswer("tarsplit", "--shards --chunks --parts", "`tarreshard --shards N` writes N shards"),
    # xargs and parallel
    OptionAnswer("tarproc", "-0", "--null goes with -T, a list of shards"),
    OptionAnswer("tarproc", "-a --arg-file", "-T FILE reads the names of shards"),
    OptionAnswer("tarproc", "-I --replace", "-c CMD gets the fields as files sample.EXT, and the key as $TAR_KEY"),
    OptionAnswer("tarproc", "-n -L -l -N -m -X --max-args --max-lines", "a command runs for each sample"),
    OptionAnswer("tarproc", "-r --no-run-if-empty", "--allow-empty accepts shards without samples"),
    OptionAnswer("tarproc", "-k --keep-order", "results keep the order of the samples, unless --unordered"),
    OptionAnswer("tarproc", "-t --tag --tagstring --results", "--add-log EXT stores what a command prints"),
    OptionAnswer("tarproc", "--max-procs --jobs --workers", "-p N runs N commands at once"),
    OptionAnswer("tarjob", "-I --replace", "{} in the command is the item"),
    OptionAnswer(
        "tarjob", "-a -0 --arg-file --null", "-s - reads items from stdin, one per line, and -s @FILE from a file"
    ),
    OptionAnswer("tarjob", "-n -L -N --max-args --max-lines", "--group N runs N items in a task"),
    OptionAnswer("tarjob", "--max-procs --jobs --workers", "-j N runs N tasks at once"),
    OptionAnswer(
        "lines2tar", "-0 -z --null --zero-terminated", "lines end with a newline: `tr '\\0' '\\n'` makes such lines"
    ),
    # tar
    OptionAnswer("tarcreate", "-f --file", "-o FILE is the tar to write"),
    OptionAnswer("tarcreate", "-c --create", "`tarcreate --dir FOLDER` needs no such option"),
    OptionAnswer("tarcreate", "-T --files-from", "--lines FILE reads the names of members and of their files"),
    OptionAnswer("tarcreate", "-x --exclude -X", "--exts takes files with these extensions"),
    OptionAnswer("", "-t --list-contents", "`tarshow` lists samples, and `tar -tf` members"),
    OptionAnswer("", "-x --extract --get", "`tar -xf` extracts members, and `tarexport --format files` samples"),
    OptionAnswer("", "--exclude -X", "-f FIELDS takes some fields, and --where EXPR some samples"),
    OptionAnswer("", "--exclude -X", "-f FIELDS takes some fields"),
    OptionAnswer("", "-A -r -u --append --concatenate", "`tarcat A B -o C` joins tars, and tools only write new ones"),
    OptionAnswer("", "--delete", "`targrep -v` leaves samples out"),
    OptionAnswer(
        "",
        "-z -j -J -Z --gzip --bzip2 --xz --zstd --compress",
        "-o NAME.tar.gz writes a compressed tar, and compressed ones are read as they are",
    ),
    OptionAnswer("", "-z -j -J -Z --gzip --bzip2 --xz --zstd", "compressed shards are read as they are"),
    OptionAnswer("", "-v", "--verbose prints more, and `tarshow` lists samples"),
    OptionAnswer("", "-v --verbose", "`tarshow` lists samples"),
    OptionAnswer("", "-F", "-f FIELDS takes some fields, and `targrep -F` searches for text"),
    # head, and whatever is called differently elsewhere
    OptionAnswer("targrep tarproc", "--lines --head --limit --max --take", "--count N takes the first N samples"),
    OptionAnswer("", "-n -N --lines --head --limit --max --take", "-c N takes the first N samples"),
    OptionAnswer("", "--tail", "--slice takes some samples, and --skip N leaves the first out"),
    OptionAnswer("", "--force --clobber", "--overwrite replaces files"),
    OptionAnswer("tarindex", "--overwrite --force --update", "indexes that are missing or stale are written"),
    OptionAnswer("", "-p -P -w --jobs --workers --threads --num-workers --processes", "-j N runs N at once"),
    OptionAnswer("", "--out --outfile --dest --output-dir", "-o is the output"),
    OptionAnswer("", "--silent --no-progress", "-q shows no progress bar"),
    OptionAnswer("", "--input --file --shard --url", "shards are named without an option"),
    OptionAnswer("", "--no-color --colour --no-colour", "--color never turns colours off"),
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
