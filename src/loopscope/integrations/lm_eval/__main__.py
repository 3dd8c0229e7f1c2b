"""`python -m loopscope.integrations.lm_eval`: lm_eval's own command line, with the model `loopscope`, and with looped
checkpoints for the model `hf`. lm_eval loads no plugins, so this module registers both before lm_eval looks for a name.
"""

import sys

from lm_eval.__main__ import cli_evaluate

import loopscope.integrations.lm_eval.lm_eval_model
import loopscope.integrations.transformers  # noqa: F401 - both register what they have
from loopscope.errors import UserError

if __name__ == "__main__":
    try:
        cli_evaluate()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
