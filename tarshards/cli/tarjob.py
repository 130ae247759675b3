"""Run a command for each of many shards: here, on Ray, by Slurm, or by Kubernetes."""

from __future__ import annotations

import re
import sys
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from tarshards.cli.parameters import FILE, Size, quiet_option
from tarshards.cli.program import Program, say, tool, usage_errors
from tarshards.errors import OpenError, StateError, TarshardsError, UrlError, visible

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

BACKENDS = ("local", "ray", "slurm", "kubernetes")
#: The options that exist only for some backends.
KNOWN_TO = {
    **dict.fromkeys(("cpu", "memory", "storage", "gpu", "deadline"), ("slurm", "kubernetes")),
    **dict.fromkeys(("partition", "sbatch"), ("slurm",)),
    **dict.fromkeys(
        (
            "image",
            "namespace",
            "service_account",
            "secret_env",
            "secret_volume",
            "patch",
        ),
        ("kubernetes",),
    ),
    "wait": ("slurm", "kubernetes"),
    "max_failed": ("local", "ray", "kubernetes"),
}
HEADINGS = {
    heading: tuple(f"--{name.replace('_', '-')}" for name, known in KNOWN_TO.items() if known == backends)
    for heading, backends in (
        ("Slurm and Kubernetes", ("slurm", "kubernetes")),
        ("Kubernetes", ("kubernetes",)),
        ("Slurm", ("slurm",)),
    )
}
NOT_FINISHED = 3
COUNT = click.IntRange(min=0)


def _complete_name(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    from tarshards.run.jobs.job_folder import names

    return [name for name in names() if name.startswith(incomplete)]


name_argument: Final = click.argument("name", required=False, shell_complete=_complete_name)
wait_option: Final = click.option("--wait", is_flag=True, help="Wait until the job has ended.")


class JobVerbs(Program):
    """The command that submits a job, and the verbs that manage jobs."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" not in args or ctx.resilient_parsing:
            try:
                return super().parse_args(ctx, args)
            except click.NoSuchOption as error:
                raise click.UsageError(f"{error.format_message()} Write the command after --.", ctx) from error
        end = args.index("--")
        rest = super().parse_args(ctx, args[:end])
        if words := ctx.params["command"]:
            cure = "quote the items for the shell: -s '{0000..0999}'"
            raise click.UsageError(f"{words[0]!r} comes before --, where only options do; {cure}", ctx)
        ctx.params["command"] = tuple(args[end + 1 :])
        return rest


def _complete_command(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the first word as a verb, others as files."""
    is_first = all(context.get_parameter_source(name) != ParameterSource.COMMANDLINE for name in context.params)
    if is_first and (verbs := main.complete(incomplete)):
        return verbs
    return FILE.shell_complete(context, parameter, incomplete)


def submits(default: str) -> Program:
    """Return the command that submits jobs, by default to this backend."""
    backend = click.Choice(BACKENDS)
    several: dict[str, Any] = {"multiple": True}
    epilog = (
        "Then: tarjob status|logs|retry|cancel [NAME]. Exit code: 0 all items are done, or submitted; 1 an item "
        "failed; 3 the job has not ended."
    )
    name = "kujob" if default == "kubernetes" else "tarjob"
    example = name + " -s '{0000..0999}' -- tarproc -p 16 -c 'run-ocr *.png' gs://b/in-{}.tar -o gs://b/ocr-{}.tar"

    @tool(cls=JobVerbs, verbs=VERBS, epilog=epilog, headings=HEADINGS, example=example)
    @click.argument(
        "command", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...", shell_complete=_complete_command
    )
    @click.option(
        *("-s", "--items"),
        metavar="ITEMS",
        **several,
        help="Items: braces, @file, globs, - for stdin; several: their product.",
    )
    @click.option("--zip", "zipped", is_flag=True, help="Pair the items of several -s, instead of their product.")
    @click.option("--inputs", metavar="SHARDS", help="Items {1}; with --outputs, instead of -s.")
    @click.option("--outputs", metavar="SHARDS", help="Items {2}: the output for each of --inputs.")
    @click.option("--group", metavar="N|SIZE", help="Items per task, or bytes per task such as 10GB.")
    @click.option("--state", metavar="URL", help="Write the done-markers to this folder, not beside the outputs.")
    @click.option("--name", metavar="NAME", help="Name of the job.  [default: derived from the command and the items]")
    @click.option("-b", "--backend", type=backend, default=default, help="Where the tasks run.")
    @click.option("--dry-run", "--print", "dry_run", is_flag=True, help="Print what would run, and exit.")
    @wait_option
    @click.option(
        "-P",
        "-j",
        "--parallel",
        "parallelism",
        type=COUNT,
        metavar="N",
        help="Tasks at once, 0: the default.  [default: as many as cores; Kubernetes: 100; Slurm: no limit]",
    )
    @click.option("--retries", type=COUNT, default=3, metavar="N", help="Retries after a failure other than status 42.")
    @click.option("--max-failed", type=COUNT, metavar="N", help="End the job when more than N items have failed.")
    @click.option(
        "--deadline", type=click.IntRange(min=1), metavar="SECONDS", help="Limit of the job, in Slurm of each task."
    )
    @click.option("--cpu", metavar="QUANTITY", help="Cores of a task: 2, 500m.")
    @click.option("--memory", metavar="QUANTITY", help="Memory of a task: 4Gi.")
    @click.option("--storage", metavar="QUANTITY", help="Scratch disk of a task: 20Gi.")
    @click.option("--gpu", type=COUNT, default=0, metavar="N", help="GPUs of a task.")
    @click.option(
        "--image",
        envvar="TARJOB_IMAGE",
        show_envvar=True,
        metavar="IMAGE",
        help="Image of the pods, with tarshards installed.  [default: image of [tarjob] in "
        "~/.config/tarshards/config.toml]",
    )
    @click.option("--namespace", metavar="NAME", help="Namespace.  [default: that of the kubeconfig]")
    @click.option("--service-account", metavar="NAME", help="Service account of the pods.")
    @click.option("--secret-env", metavar="SECRET|NAME=SECRET:KEY", **several, help="Variables from a secret.")
    @click.option("--secret-volume", metavar="SECRET:PATH", **several, help="A secret as files.")
    @click.option(
        "--patch",
        type=click.Path(exists=True, dir_okay=False),
        metavar="FILE",
        help="Merge this patch (JSON or YAML) into the Job.",
    )
    @click.option("--partition", metavar="NAME", help="Partition of the tasks.")
    @click.option("--sbatch", metavar="OPTION", **several, help="Another #SBATCH line, like --account=x.")
    @quiet_option
    @wraps(_run)
    def command(**options: Any) -> None:
        _run(**options)

    return command


def _run(**options: Any) -> None:
    """Run COMMAND for every item; run the same line again to resume after an interruption.

    {} is the item, {.} without its extension, {/} its base name, {#} its number; {1} and {2} are those of two lists.
    COMMAND is a program and its arguments, or one word with spaces: a line of bash. An item is done when COMMAND ends
    with status 0 and its output exists; then a marker is written beside the output. After status 42 it is not retried.
    """
    command, backend, quiet = options.pop("command"), options.pop("backend"), options.pop("quiet")
    _check_known(backend)
    options["items"] = ["@-" if each == "-" else each for each in options["items"]]
    items, inputs, outputs = options["items"], options["inputs"], options["outputs"]
    example = "name them with -s ITEMS, such as -s '{0000..0999}' or -s '*.tar', or with --inputs and --outputs"
    if not items and inputs is None and outputs is None:
        raise click.UsageError(f"no items to run the command for; {example}")
    if (inputs is None) != (outputs is None):
        raise click.UsageError("--inputs requires --outputs, and --outputs --inputs")
    if items and inputs is not None:
        raise click.UsageError("-s cannot be combined with --inputs and --outputs")
    from tarshards.run.jobs.job_folder import JobFolder
    from tarshards.run.jobs.job_options import Options, configured_image
    from tarshards.run.jobs.job_plan import check_markers, make_plan
    from tarshards.run.jobs.scheduler import ATTENDED, make_scheduler, submit

    names = ("zipped", "inputs", "outputs", "state", "name")
    wait, dry_run, group = options.pop("wait"), options.pop("dry_run"), options.pop("group")
    try:
        plan = make_plan(command, options.pop("items"), **{name: options.pop(name) for name in names})
        if plan.output is None and plan.state is None:
            if backend == "kubernetes":
                lacking = "no place for the markers: give --outputs, --state URL, or -o FILE in the command"
                raise click.UsageError(lacking)
            plan = plan._replace(state=JobFolder(plan.name).state)
            check_markers(plan)
        plan = _grouped(plan, group)
        options["patch"] = _read_patch(options["patch"])
        if backend == "kubernetes" and options["image"] is None:
            options["image"] = configured_image()
        if backend == "kubernetes":
            from tarshards.run.jobs.kubernetes_objects import check_outputs

            check_outputs(plan, options["patch"])
        wanted, folder = Options(**options), JobFolder(plan.name)
        if dry_run:
            attended = backend in ATTENDED
            text = _preview(plan) if attended else make_scheduler(backend, wanted, folder).preview(plan)
    except UrlError as error:  # the items are words of the command line
        raise click.UsageError(str(error)) from error
    except TarshardsError:
        raise
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if dry_run:
        click.echo(text, nl=False)
        return
    if backend in ATTENDED:
        _attend(plan, folder, wanted, backend, quiet=quiet)
    with usage_errors():
        status = submit(plan, folder, backend, wanted)
    if status.done and not quiet:
        say(status.kept())
    if status.ended:
        _finish(plan, status, [], quiet)
    if wait:
        _wait(folder, quiet)
    say(f"submitted {status.total - len(status.done) - len(status.failed)} items as {plan.name}")


def _check_known(backend: str) -> None:
    context = click.get_current_context()
    for name, backends in KNOWN_TO.items():
        is_given = context.get_parameter_source(name) == ParameterSource.COMMANDLINE
        if is_given and backend not in backends:
            raise click.UsageError(f"--{name.replace('_', '-')} goes with --backend {' or '.join(backends)}")


def _grouped(plan: Any, group: str | None) -> Any:
    if group is None:
        return plan
    from tarshards.run.jobs.job_plan import group_tasks
    from tarshards.storage.location import Location, look_up

    try:
        sizes: list[int | None] = list(look_up(Location.size, [item.values[0] for item in plan.items]))
    except OpenError:
        sizes = []
    if group.isdigit() and int(group) > 0:
        return group_tasks(plan, count=int(group), sizes=sizes)
    if group.isdigit() or not re.search("[kmgt]", group.lower()):
        raise click.UsageError(f"--group {group}: write a number of items, or a size like 10GB")
    return group_tasks(plan, size=Size().convert(group, None, None), sizes=sizes)


def _read_patch(path: str | None) -> Any:
    if path is None:
        return {}
    from tarshards.run.jobs.kubernetes import read_patch

    return read_patch(path)


def _preview(plan: Any) -> str:
    from shlex import join

    lines = [join(plan.arguments(item)) for item in plan.items]
    if plan.has_credentials:
        lines = [item.redacted(line) for item, line in zip(plan.items, lines)]
    return "".join(f"{line}\n" for line in lines)


def _attend(plan: Any, folder: Any, options: Any, backend: str, *, quiet: bool, again: bool = False) -> None:
    """Run a plan on this machine, or from it on Ray, and exit."""
    from dataclasses import asdict

    from tarshards.parallel.host import available_cores
    from tarshards.run.jobs.local_run import remove_unfinished, run_local
    from tarshards.run.jobs.status import Display, survey

    slots, executor = options.parallelism or available_cores(), None
    if backend == "ray":
        from tarshards.engines.ray import RayExecutor

        executor = RayExecutor(num_cpus=plan.cores or 1)
        slots = options.parallelism or executor.slots
    with folder.locked() as was_killed:
        folder.save(plan, engine=backend, options=asdict(options), parts=[])
        begun = survey(plan)
        if begun.done and not quiet:
            say(begun.kept())
        if was_killed:
            remove_unfinished(plan, begun)
        with Display(plan, begun, quiet=quiet) as display:
            status = run_local(
                plan,
                folder,
                begun,
                options,
                slots=slots,
                again=again,
                executor=executor,
                show=display.update,
            )
    _finish(plan, status, [], quiet)


def _wait(folder: Any, quiet: bool) -> None:
    from tarshards.run.jobs.scheduler import wait
    from tarshards.run.jobs.status import Display, survey

    plan, _ = folder.load()
    with Display(plan, survey(plan), quiet=quiet) as display:
        plan, status, notes = wait(folder, display.update)
    _finish(plan, status, notes, quiet)


def _finish(plan: Any, status: Any, notes: list[str], quiet: bool) -> None:
    """Report unfinished items on stderr, and exit with the corresponding code."""
    from tarshards.run.jobs.status import table

    if not status.complete or notes:
        click.echo("\n".join([table(plan, status), *map(visible, notes)]), err=True)
    elif not quiet:
        say(f"{status.total} items done")
    sys.exit(_code(status))


def _code(status: Any) -> int:
    if not status.ended:
        return NOT_FINISHED
    return 0 if status.complete else 1


def _folder(name: str | None) -> Any:
    from tarshards.run.jobs.job_folder import JobFolder, names

    known = names()
    if name is None and not known:
        raise StateError("no job was started in this directory")
    return JobFolder(name or known[-1])


@tool()
@name_argument
@wait_option
@quiet_option
def show_status(name: str | None, wait: bool, quiet: bool) -> None:
    """Show the progress of the job NAME, by default the latest started in this directory.

    Exit code: 0 all items are done; 1 the job has ended and some are not; 3 it has not ended.
    """
    from tarshards.run.jobs.scheduler import status_of
    from tarshards.run.jobs.status import table

    folder = _folder(name)
    if wait:
        _wait(folder, quiet)
    plan, status, notes = status_of(folder)
    click.echo("\n".join([table(plan, status), *map(visible, notes)]))
    sys.exit(_code(status))


@tool()
@name_argument
@wait_option
@quiet_option
def retry(name: str | None, wait: bool, quiet: bool) -> None:
    """Run the items of the job NAME that are not done, including those that ended with status 42."""
    from tarshards.run.jobs.scheduler import ATTENDED, options_of, submit

    folder = _folder(name)
    plan, record = folder.load()
    if record["engine"] in ATTENDED:
        _attend(plan, folder, options_of(record), record["engine"], quiet=quiet, again=True)
    status = submit(plan, folder, record["engine"], options_of(record), again=True)
    if status.ended:
        _finish(plan, status, [], quiet)
    if wait:
        _wait(folder, quiet)
    say(f"submitted {status.total - len(status.done)} items as {plan.name}")


@tool()
@name_argument
@click.argument("items", nargs=-1)
def logs(name: str | None, items: tuple[str, ...]) -> None:
    """Print the logs of ITEMS of the job NAME, given by value or number; by default of those that failed."""
    from tarshards.run.jobs.scheduler import log_of
    from tarshards.run.jobs.status import survey

    folder = _folder(name)
    plan, _ = folder.load()
    wanted = set(items) or {str(number) for number in survey(plan).failed}
    chosen = [item for item in plan.items if str(item.number) in wanted or wanted & {*item.values, *item.names}]
    if items and not chosen:
        raise StateError(f"{plan.name} has no item {' '.join(items)}")
    for item in chosen:
        click.echo(visible(f"==> {item.number} {' '.join(item.names)} <=="), err=True)
        click.echo(log_of(folder, item), nl=False)


@tool()
@name_argument
def cancel(name: str | None) -> None:
    """End the running tasks of the job NAME; run its command line again to resume."""
    from tarshards.run.jobs import scheduler

    folder = _folder(name)
    say(f"{folder.name}: {'cancelled' if scheduler.cancel(folder) else 'nothing was running'}")


@tool(hidden=True)
@click.argument("plan")
@click.option("--index", type=click.IntRange(min=0), help="Number of the task.  [default: from the environment]")
def worker(plan: str, index: int | None) -> None:
    """Run one task of PLAN, as Slurm and Kubernetes do."""
    from tarshards.run.jobs.init_process import leave_init
    from tarshards.run.jobs.worker import run_task

    leave_init()
    sys.exit(run_task(plan, index=index))


VERBS: Final = {"status": show_status, "retry": retry, "logs": logs, "cancel": cancel, "worker": worker}
main = submits("local")
kujob = submits("kubernetes")
