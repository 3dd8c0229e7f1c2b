"""What is tracked: can every clone follow its symbolic links?"""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINK = "120000"  # git's mode of a symbolic link


def test_every_tracked_link_leads_to_a_tracked_file() -> None:
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-s", "-z"], capture_output=True, text=True)
    entries = [entry.split("\t", 1) for entry in listed.stdout.split("\0")[:-1]]
    if not entries:
        pytest.skip("this is no git checkout: nothing says what is tracked")
    files = {ROOT / name for about, name in entries if not about.startswith(LINK)}
    targets = files | {folder for file in files for folder in file.parents}
    for about, name in entries:
        if about.startswith(LINK):
            written = (ROOT / name).readlink()
            assert not written.is_absolute(), f"{name} leads to a place that only this clone has"
            assert Path(os.path.normpath((ROOT / name).parent / written)) in targets, f"{name} leads to nothing"
