"""Prints the lowest versions that pyproject.toml allows of what gristmill and its extras depend on, as pip's
requirements: `make test-lowest` installs them. A dependency that has no lower bound ends it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[1]
# What no test with the lowest versions looks at, and why.
LEFT_OUT = {
    "vllm": "pins torch and much else to versions of its own: make test-vllm",
    "pyspark": "has no wheel, only 300 MB of source, and needs a Java",
    "openvino-genai": "needs the openvino of its own release, and the bound of openvino is a year older",
}
# A looser pin, or an older one, brings a build with several gigabytes of CUDA: the version of constraints.txt.
PINNED = {"torch"}
BOUND = re.compile(r"(?P<name>[\w.-]+)(?P<extras>\[[^\]]+\])?\s*>=\s*(?P<version>[\w.]+)")


def main() -> None:
    """One requirement a line; of a package that several extras name, the highest of their bounds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    lowest: dict[str, str] = {}
    for requirement in named:
        if requirement.startswith(f"{project['name']}["):
            continue  # an extra that is made of others
        bound = BOUND.match(requirement)
        if bound is None:
            sys.exit(f"{requirement!r} of pyproject.toml has no lower bound: say the lowest version that it works with")
        name = bound["name"] + (bound["extras"] or "")
        lowest[name] = max(lowest.get(name, "0"), bound["version"], key=_order)
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for name, version in lowest.items():
        if name not in LEFT_OUT:
            print(f"{name}=={pinned[name] if name in PINNED else version}")


def _order(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


if __name__ == "__main__":
    main()
