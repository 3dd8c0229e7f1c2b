"""What is said when the input is wrong: one sentence that a user can act on.

The command line turns a `UserError` into that sentence and exit code 2; any other exception is a bug of ours
and keeps its traceback.
"""


class UserError(ValueError):
    """Bad input; the message says what is wrong and what to do."""
