"""The entry point: which sub-command, how many processes, and how errors are shown.

Importing this imports no torch, so that help, ``tasks`` and flag errors are instant.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapidformer.cli.commands import COMMANDS, OWN_FLAGS
from rapidformer.cli.exhaustion import describe_exhaustion
from rapidformer.errors import RapidformerError

if TYPE_CHECKING:
    from rapidformer.config import Settings
    from rapidformer.config.parse import CommandLine
    from rapidformer.launch.environment import LaunchPlan


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    from rapidformer.launch.worker import attach_to_launcher

    words = list(sys.argv[1:] if argv is None else argv)
    attach_to_launcher()
    try:
        return _dispatch(words)
    except RapidformerError as error:
        if not getattr(error, "is_told", False):
            _show(error)
        return _get_status(error)
    except KeyboardInterrupt as stop:
        # The training loop reports what it saved, and the launcher reports for its processes.
        if not stop.args and not _is_launched_by_us():
            sys.stderr.write("\nstopped by Ctrl-C: nothing after the last checkpoint was saved.\n")
        return 130
    except BrokenPipeError:
        # The reader (`| head`) closed the pipe. Python would complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if reason := describe_exhaustion(error):
            _show(RapidformerError(reason))
            return 1
        # A bug, ours or the script's. Under our launcher, only the process that failed first is
        # shown: the others fail because of it.
        from rapidformer.cli.tracebacks import shorten
        from rapidformer.launch.failures import report_failure

        error.__traceback__ = shorten(error.__traceback__)
        if not report_failure("".join(traceback.format_exception(error))):
            # Raised again, it would get this command's frames back. A script may have its own hook.
            sys.excepthook(type(error), error, error.__traceback__)
        return 1


def _is_launched_by_us() -> bool:
    from rapidformer.launch.environment import is_launched, is_started_node

    return is_launched() or is_started_node()


def _get_status(error: RapidformerError) -> int:
    from rapidformer.launch.environment import is_launched, is_started_node

    code = int(getattr(error, "exit_code", 1))
    if is_started_node() and not is_launched():
        from rapidformer.launch.hosts import disguise_status

        code = disguise_status(code)
    return code


def _dispatch(words: list[str]) -> int:
    if words and words[0] in ("help", "--help", "-h"):
        words = _spell_help(words[1:])
    name = words[0] if words and not words[0].startswith("-") else "train"
    if name not in COMMANDS:
        raise RapidformerError(_describe_unknown(name))
    rest = words[1:] if words and words[0] == name else words
    if not words or (name not in OWN_FLAGS and ("--help" in rest or "-h" in rest)):
        from rapidformer.cli.help import show_help

        show_help(name if words and words[0] == name else None, _find_topic(rest))
        return 0
    if "--version" in rest and name != "launch":
        from importlib.metadata import version

        sys.stdout.write(f"rapidformer {version('rapidformer')}\n")
        return 0
    module, is_distributed, _ = COMMANDS[name]
    if is_distributed:
        if "--print-config" in rest and name != "launch":
            from rapidformer.cli.help import print_config

            print_config([word for word in rest if word != "--print-config"])
            return 0
        if name != "launch":
            return _run_distributed(name, module, rest)
        if _starts_script(rest):
            return 0
    run: Callable[[list[str]], None] = import_module(module).run
    run(rest)
    return 0


def _run_distributed(name: str, module: str, words: list[str]) -> int:
    """Run the command in one process per GPU, or here if this process is enough."""
    from rapidformer.config.parse import read_flags

    command = read_flags(words)
    if not _starts_processes(name, command):
        run: Callable[[CommandLine], None] = import_module(module).run
        run(command)
    return 0


def _spell_help(rest: list[str]) -> list[str]:
    """`rapidformer help predict` is `rapidformer predict --help`; a topic's name is the topic."""
    from rapidformer.cli.help import TOPICS

    is_command = bool(rest) and rest[0] in COMMANDS and rest[0] not in TOPICS
    return [rest[0], "--help"] if is_command else ["--help", *rest]


def _find_topic(words: list[str]) -> str | None:
    """The word after ``--help``, if that is the first flag."""
    return words[1] if words[:1] in (["--help"], ["-h"]) and len(words) > 1 else None


def _starts_script(words: list[str]) -> bool:
    """Start the script of ``rapidformer launch``; False if this process is enough."""
    from rapidformer.cli.launch import read_launch_settings, wants_help
    from rapidformer.launch.environment import is_launched

    if is_launched() or wants_help(words):
        return False
    return _start(read_launch_settings(words), ["launch", *words])


def _starts_processes(name: str, command: CommandLine) -> bool:
    """Start one process per GPU, if there are several; False if this process is enough."""
    from rapidformer.launch.environment import is_launched

    if is_launched():
        return False
    args = command.args
    if args.user_script is not None and args.hostfile is None:
        from rapidformer.cli.train import check_script

        check_script(args.user_script)
    plan = None
    if args.user_script is None and args.hostfile is None:
        # Checked before any process is started, except for scripts, which may have their own flags
        # and check later, and for hostfiles, since only the hosts know how many processes there
        # will be.
        from rapidformer.cli.checks import check_command

        args, plan = check_command(name, command)
    if args.log_level in ("debug", "info"):
        _say_loading(args)
    return _start(args, [name, *command.words], plan)


def _say_loading(args: Settings) -> None:
    """Printed at once: the imports that follow take seconds without any output."""
    model = args.load or args.pretrained_model_name_or_path or args.model_type
    data = args.data_path or args.data_dir or args.data_name or args.train_data
    named = [args.user_script, model, *(data if isinstance(data, list) else [data])]
    what = ", ".join(["torch", *dict.fromkeys(str(name) for name in named if name)])
    sys.stderr.write(f"loading   {what}\n")
    sys.stderr.flush()


def _start(args: Settings, words: list[str], plan: LaunchPlan | None = None) -> bool:
    """Hand over to the launcher; False if this process is enough.

    An existing plan is reused, because making one queries the GPU driver.
    """
    from rapidformer.launch.environment import is_started_node, needs_agent, plan_launch

    def say(text: str) -> None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

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


def _describe_unknown(name: str) -> str:
    from rapidformer.nearest import find_nearest

    near = find_nearest(name, COMMANDS)
    hint = f" Did you mean {near}?" if near else ""
    return f"there is no command {name!r}: use one of {', '.join(COMMANDS)}.{hint}"


def _show(error: RapidformerError) -> None:
    from rapidformer.launch.failures import report_failure

    if not report_failure(str(error), is_mistake=True):
        sys.stderr.write(f"error: {error}\n")


def run_and_leave() -> None:
    """Run the command in its own process, and stop that process.

    Python waits for threads that are not daemons. After a failure, the other ranks would wait for
    this one, and the launcher for its end.
    """
    try:
        status: Any = main()
    except SystemExit as stop:
        status = stop.code
    from rapidformer.launch.environment import is_launched

    if status and is_launched():
        if not isinstance(status, int):
            sys.stderr.write(f"{status}\n")
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    run_and_leave()
