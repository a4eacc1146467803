"""The entry point: which sub-command, how many processes, how errors are shown. Without torch."""

from __future__ import annotations

import errno
import os
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rapidformer.cli import COMMANDS, DISTRIBUTED, OWN_FLAGS
from rapidformer.cli.own_flags import HelpShownError, say
from rapidformer.config.derive import is_launched
from rapidformer.errors import RapidformerError, is_out_of_gpu_memory, raise_problems
from rapidformer.launch.environment import LaunchPlan, is_started_node, needs_agent, plan_launch
from rapidformer.launch.failures import report_failure
from rapidformer.launch.worker import attach_to_launcher, die_with_parent
from rapidformer.nearest import suggest

if TYPE_CHECKING:
    from rapidformer.config import Settings
    from rapidformer.config.parse import CommandLine


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    die_with_parent()
    attach_to_launcher()
    try:
        _dispatch(words)
    except HelpShownError:
        pass
    except RapidformerError as error:
        if not getattr(error, "is_told", False):
            _show(error)
        return _get_status(error)
    except KeyboardInterrupt as stop:
        # The training loop reports what it saved, and the launcher reports for its processes.
        if not stop.args and not is_launched() and not is_started_node():
            is_run = not words or words[0] in ("train", "launch") or words[0] not in COMMANDS
            lost = ": nothing after the last checkpoint was saved" if is_run else ""
            sys.stderr.write(f"\nstopped by Ctrl-C{lost}.\n")
        return 130
    except BrokenPipeError:
        # The reader (`| head`) closed the pipe. Python would complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        if reason := describe_exhaustion(error):
            _show(RapidformerError(reason))
            return 1
        # A bug, ours or the script's. Under our launcher, only the process that failed first is
        # shown: the others fail because of it.
        error.__traceback__ = shorten(error.__traceback__)
        if not report_failure("".join(traceback.format_exception(error))):
            # Raised again, it would get this command's frames back. A script may have its own hook.
            sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _get_status(error: RapidformerError) -> int:
    code = int(getattr(error, "exit_code", 1))
    if is_started_node() and not is_launched():
        from rapidformer.launch.hosts import disguise_status

        return disguise_status(code)
    return code


def _dispatch(words: list[str]) -> None:
    if words and words[0] in ("help", "--help", "-h"):
        # `rapidformer help predict` is `rapidformer predict --help`; a topic's name is the topic.
        from rapidformer.cli.help import TOPICS

        is_command = words[1:2] and words[1] in COMMANDS and words[1] not in TOPICS
        words = [words[1], "--help"] if is_command else ["--help", *words[1:]]
    is_named = bool(words) and not words[0].startswith("-")
    name, rest = (words[0], words[1:]) if is_named else ("train", words)
    if name not in COMMANDS:
        listed, hint = ", ".join(COMMANDS), suggest(name, COMMANDS)
        raise RapidformerError(f"there is no command {name!r}: use one of {listed}.{hint}")
    if not words or (name not in OWN_FLAGS and ("--help" in rest or "-h" in rest)):
        from rapidformer.cli.help import show_help

        topic = rest[1] if rest[:1] in (["--help"], ["-h"]) and len(rest) > 1 else None
        show_help(name if is_named else None, topic)
    elif "--version" in rest and name != "launch":
        from importlib.metadata import version

        sys.stdout.write(f"rapidformer {version('rapidformer')}\n")
    elif "--print-config" in rest and name in DISTRIBUTED:
        from rapidformer.cli.help import print_config

        print_config([word for word in rest if word != "--print-config"])
    elif name in DISTRIBUTED:
        from rapidformer.config.parse import read_flags

        command = read_flags(rest)
        if not _starts_processes(name, command):
            import_module(f"rapidformer.cli.{name}").run(command)
    elif name != "launch" or not _starts_script(rest):
        import_module(f"rapidformer.cli.{name}").run(rest)


def _starts_script(words: list[str]) -> bool:
    """Start the script of ``rapidformer launch``; False if this process is enough."""
    from rapidformer.cli.launch import read_launch_settings, wants_help

    if is_launched() or wants_help(words):
        return False
    return _start(read_launch_settings(words), ["launch", *words])


def _starts_processes(name: str, command: CommandLine) -> bool:
    """Start one process per GPU, if there are several; False if this process is enough."""
    if is_launched():
        return False
    args, plan = command.args, None
    if args.hostfile is None and args.user_script is not None:
        from rapidformer.cli.train import check_script

        check_script(args.user_script)
    elif args.hostfile is None:
        # Checked before any process is started, except for scripts, which may have their own flags
        # and check later, and for hostfiles, since only the hosts know how many processes there
        # will be.
        from rapidformer.cli.checks import check_command

        args, plan = check_command(name, command)
    elif args.user_script is None:
        raise_problems(command.problems)
    if args.log_level in ("debug", "info"):
        _say_loading(args)
    return _start(args, [name, *command.words], plan)


def _say_loading(args: Settings) -> None:
    """Printed at once: the imports that follow take seconds without any output."""
    model = args.load or args.pretrained_model_name_or_path or args.model_type
    data = args.data_path or args.data_dir or args.data_name or args.train_data
    named = [args.user_script, model, *(data if isinstance(data, list) else [data])]
    what = ", ".join(["torch", *dict.fromkeys(str(name) for name in named if name)])
    say(f"loading   {what}")


def _start(args: Settings, words: list[str], plan: LaunchPlan | None = None) -> bool:
    """Hand over to the launcher; False if this process is enough. A plan asks the GPU driver."""
    if args.hostfile is not None and not is_started_node():
        from rapidformer.launch.hosts import launch_hosts

        launch_hosts(words, args, say)
        return True
    plan = plan or plan_launch(args)
    if not needs_agent(plan, args):
        return False
    from rapidformer.launch.local import launch

    folder = args.log_dir or (args.save and str(Path(args.save) / "logs"))
    launch(plan, words, args, log_dir=Path(folder).expanduser() if folder else None, say=say)
    return True


def _show(error: RapidformerError) -> None:
    if not report_failure(str(error), is_mistake=True):
        sys.stderr.write(f"error: {error}\n")


def run_and_leave() -> None:
    """Run the command and stop the process: after a failure, Python would wait for its threads."""
    try:
        status: Any = main()
    except SystemExit as stop:
        status = stop.code
    if status and is_launched():
        if not isinstance(status, int):
            sys.stderr.write(f"{status}\n")
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_INSTALLED = {"site-packages", "dist-packages"}  # anywhere: a user may have packages, too
_MEMORY = (
    "use a smaller --micro-batch-size (--global-batch-size keeps the result the same), "
    "--checkpoint-activations, or --zero-3-memory-optimization on several GPUs"
)
_DISK = {
    errno.ENOSPC: "free some space, or inodes", errno.EDQUOT: "free some of your quota",
    errno.EROFS: "choose a folder that can be written to",
    errno.EMFILE: "raise the limit with `ulimit -n`", errno.ENFILE: "close other programs",
    errno.ENAMETOOLONG: "give a shorter name",
}  # fmt: skip


def shorten(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script on; without our frames, unless the error may be ours."""
    entries, following = [], trace
    while following is not None:
        entries.append(following)
        following = following.tb_next
    runs = [index for index, entry in enumerate(entries) if _get_module(entry) == "runpy"]
    if not runs:
        return trace
    entries = entries[runs[-1] + 1 :]
    ours = [index for index, entry in enumerate(entries) if _is_ours(entry)]
    script = [index for index, entry in enumerate(entries) if _is_script(entry)]
    if script and (not ours or ours[-1] < script[-1]):
        entries = [entry for entry in entries if not _is_ours(entry)]
    shortened = None
    for entry in reversed(entries):
        shortened = TracebackType(shortened, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shortened or trace


def _get_module(entry: TracebackType) -> str:
    return str(entry.tb_frame.f_globals.get("__name__"))


def _is_ours(entry: TracebackType) -> bool:
    return _get_module(entry).partition(".")[0] == "rapidformer"


def _is_script(entry: TracebackType) -> bool:
    file = entry.tb_frame.f_code.co_filename
    is_library = file.startswith((_STANDARD_LIBRARY, "<")) or _INSTALLED & set(Path(file).parts)
    return not is_library and not _is_ours(entry)


def describe_exhaustion(error: BaseException) -> str | None:
    """One sentence with a way out; None for any other error."""
    text = next(iter(str(error).splitlines()), "")
    if isinstance(error, OSError) and error.errno in _DISK:
        name = str(error.filename or "")
        where = f" ({name[:100]}{'...' * (len(name) > 100)})" if name else ""
        return f"{error.strerror}{where}: {_DISK[error.errno]}."
    if isinstance(error, RuntimeError) and text == "Could not determine home directory.":
        return (
            "a path begins with ~ and the name of a user who is not on this machine: write the "
            "path in full, or ./~... for a file of that name."
        )
    if is_out_of_gpu_memory(error):
        advice = getattr(error, "advice", f"To fit, {_MEMORY}.")
        text = text.partition(" Of the allocated memory")[0]  # torch's own advice follows
        text = text.rstrip(".") + "."
        return f"GPU memory ran out: {text} {advice}"
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return f"host memory ran out{': ' + text if text else ''}. To fit, {_MEMORY}."
    return None


if __name__ == "__main__":
    run_and_leave()
