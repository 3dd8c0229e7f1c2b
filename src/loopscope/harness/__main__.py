"""`python -m loopscope.harness`: lm_eval's own command line, in which the model `loopscope` and, for the model `hf`,
looped checkpoints are known. lm_eval loads no plugins, so somebody has to import ours before it looks for a name.
"""

import sys

from loopscope.errors import UserError


def run_lm_eval() -> None:
    try:
        from lm_eval.__main__ import cli_evaluate

        import loopscope.harness.lm_eval_model
        import loopscope.transformers  # noqa: F401 - both register what they have
    except ModuleNotFoundError as error:
        raise UserError(f"This needs {error.name}; install it with: pip install 'loopscope[lm]'.") from None
    cli_evaluate()


if __name__ == "__main__":
    try:
        run_lm_eval()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
