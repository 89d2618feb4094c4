"""Commands of benchctl in forks of this process."""

import os
import sys
from importlib import import_module


def run_unit(unit):
    """Run the commands of (name, {file: arguments}, working directory, folder, home) in turn; return the name.

    Each unit has a home of its own, so that no other commands' noise floors and durations are on file.
    """
    name, commands, cwd, folder, home = unit
    for needed in (folder, home):
        needed.mkdir(parents=True, exist_ok=True)
    os.environ["HOME"] = str(home)
    for file, arguments in commands.items():
        out, err = folder / file, (folder / file).with_suffix(".json.err" if file.endswith(".json") else ".err")
        code = run_forked([str(each) for each in arguments], cwd, out, err)
        with err.open("a", encoding="utf-8") as stream:
            stream.write(f"exit code {code}\n")
    return name


def run_forked(arguments, cwd, out, err):
    """Exit code of ``benchctl ARGUMENTS``; negative: the signal that ended it."""
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        try:
            os.chdir(cwd)
            for number, source in ((0, os.devnull), (1, out), (2, err)):
                flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                os.dup2(os.open(source, flags, 0o644), number)
            sys.argv = ["benchctl", *arguments]
            import_module("benchctl.__main__").main()
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code if isinstance(end.code, int) else bool(end.code))
        finally:
            os._exit(70)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
