"""The fuzzer's command: python -m tests.fuzz --inputs 20000 --seed 0."""

import argparse
import sys
from contextlib import suppress
from pathlib import Path

from .kinds import KINDS
from .runner import Fuzzer, working_folder
from .world import World


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000, metavar="N", help="default: 20,000")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument("--only", action="append", choices=KINDS, metavar="KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--index", type=int, metavar="I", help="input I of this kind alone")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where inputs that fail are kept")
    options = parser.parse_args()
    if options.index is not None and len(options.only or ()) != 1:
        parser.error("--index is of one kind; give it with --only.")
    kinds = {name: kind for name, kind in KINDS.items() if name in (options.only or KINDS)}
    with working_folder() as folder:
        fuzzer, known = Fuzzer(World(folder), kinds, options.seed, options.keep), set[str]()

        def progress(done: int) -> None:
            """Each cause at once, where it is first met, and how far it is."""
            for each in fuzzer.failures[-1:]:
                if each.place not in known:
                    known.add(each.place)
                    print(f"--only {each.kind} --index {each.index}: {each.what}", file=sys.stderr, flush=True)
            if done % 1_000 == 0:
                print(f"{done:,} inputs, {len(fuzzer.failures):,} failures", file=sys.stderr, flush=True)

        if options.index is not None:
            fuzzer.attempt(options.only[0], options.index)
        else:
            print(f"A hang that no signal ends stops the fuzzer; {fuzzer.work}/now says at which input.", flush=True)
            with suppress(KeyboardInterrupt):  # what was tried by then is told
                fuzzer.run(options.inputs, progress)
        print(fuzzer)
        if options.index is not None:
            print("\n".join(failure.trace for failure in fuzzer.failures))
    return 1 if fuzzer.failures else 0


if __name__ == "__main__":
    sys.exit(main())
