"""A fuzzer: mutated inputs of every kind of file and argument, each of which must be right or refused in a sentence.

`python -m tests.fuzz --inputs 20000 --seed 0` (make fuzz) runs it; `--only KIND --index I` repeats one input alone.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # what tests share lies there
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "110"}
