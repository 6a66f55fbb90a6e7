"""The README, and the commands in it."""

import re

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def section(heading: str) -> str:
    """What stands under a heading of the second level."""
    return README.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def commands(heading: str) -> list[str]:
    """The commands of a section."""
    code = "\n".join(re.findall(r"```sh\n(.*?)```", section(heading), re.DOTALL))
    return [line.partition("  #")[0].rstrip() for line in code.splitlines()]


def one(heading: str, start: str) -> str:
    """The one command of a section that starts like this."""
    (command,) = [command for command in commands(heading) if command.startswith(start)]
    return command
