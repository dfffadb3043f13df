"""Maps whose results are kept: `python maps.py checkpoint FOLDER` prints them, `python maps.py detached` an id."""

import sys

import gristmill as gm


class Answer:
    """Of a class of the script itself, which is kept by its name."""

    def __init__(self, n):
        self.n = n


def square(n):
    with open("calls.log", "a", encoding="utf-8") as file:
        file.write(f"{n}\n")
    if n < 0:
        raise ValueError("negative")
    return Answer(n * n)


if __name__ == "__main__":
    if sys.argv[1] == "checkpoint":
        print([a.n for a in gm.remote_parallel_map(square, range(8), checkpoint=sys.argv[2], max_parallelism=1)])
    else:
        print(gm.remote_parallel_map(square, [0, 1, 2, -3], detach=True, return_exceptions=True, max_parallelism=1).id)
