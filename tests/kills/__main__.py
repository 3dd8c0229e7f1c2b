"""Kill every verb that writes, let two write at once, fill its disk, and count what was not as it should be.

python -m tests.kills --kills 400 --seed 0
python -m tests.kills --only "record task" --kills 0 --pairs 50 --disks none
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tester import Count

sys.path.insert(0, str(Path(__file__).parents[1]))  # what all tests share
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a fork of a process with threads would wait for them for ever
_PRIVATE = "LOOPSCOPE_KILLS_PRIVATE"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=400, metavar="N", help="over all scenes (default: 400)")
    parser.add_argument("--pairs", type=int, default=10, metavar="N", help="two writers, of every scene (default: 10)")
    parser.add_argument("--disks", choices=("all", "few", "none"), default="all", help="sizes of full disks")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--only", action="append", metavar="SCENE", help="(repeatable; default: all)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    _take_private_mounts()
    with tempfile.TemporaryDirectory(prefix="loopscope-kills-") as folder:
        return _test(options, Path(folder).resolve())


def _take_private_mounts() -> None:
    """Begins again with mounts of its own, where the system lets users have them."""
    if _PRIVATE in os.environ or shutil.which("unshare") is None:
        return
    shell = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
    begin = [*["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"], shell, "sh"]
    if subprocess.run([*begin, "true"], capture_output=True).returncode == 0:
        os.environ[_PRIVATE] = "1"
        os.execvp(begin[0], [*begin, sys.executable, "-m", "tests.kills", *sys.argv[1:]])


def _test(options: argparse.Namespace, folder: Path) -> int:
    import torch

    from .scenes import SCENES
    from .tester import Tester

    torch.set_num_threads(1)
    unknown = set(options.only or ()) - {scene.name for scene in SCENES}
    if unknown:
        print(f"There is no scene {', '.join(unknown)}; choose one of {', '.join(scene.name for scene in SCENES)}.")
        return 2
    scenes = [scene for scene in SCENES if scene.available and (not options.only or scene.name in options.only)]
    begun, tester, counts = time.monotonic(), Tester(folder, options.seed), []

    def counted(count: "Count") -> None:
        counts.append(count)
        seconds, outcomes = time.monotonic() - begun, ", ".join(f"{n}: {how}" for how, n in count.outcomes.items())
        tried = f"{count.tries} tries, {len(count.faults)} faults ({outcomes})"
        print(f"{seconds:6.0f} s  {count.scene}, {count.what}: {tried}", file=sys.stderr, flush=True)
        for fault in count.faults:
            print(f"          {fault}", file=sys.stderr, flush=True)

    left = options.kills
    for place, scene in enumerate(scenes):
        rest = sum(each.share for each in scenes[place:])
        kills = round(left * scene.share / rest)
        left -= kills
        if kills:
            counted(tester.kills(scene, kills))
        pairs = round(options.pairs * min(1.0, scene.share))
        if pairs:
            counted(tester.pairs(scene, pairs))
        if pairs and scene.neighbours:
            counted(tester.pairs(scene, pairs, neighbours=True))
        if options.disks != "none" and _PRIVATE in os.environ:
            counted(tester.full_disks(scene, few=options.disks == "few" or scene.share < 0.5))
    if options.disks != "none" and _PRIVATE not in os.environ:
        print("Full disks were left out: this system lets users mount nothing.", file=sys.stderr)
    if options.json:
        print(json.dumps([vars(count) for count in counts], indent=2))
    return 1 if any(count.faults for count in counts) else 0


if __name__ == "__main__":
    sys.exit(main())
