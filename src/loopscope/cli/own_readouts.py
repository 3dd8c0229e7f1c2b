"""How does a readout of a user's own get to the command line? As MODULE:NAME, imported because the user typed it.

A file that names a readout never imports anything: what it names must be known or installed.
"""

import argparse
import sys
from importlib import import_module

from loopscope.errors import UserError, reason

_OPTIONS = ("readout", "first", "second")
"""Where readouts are named: by their option, or as one of two to be compared."""
_FITTED = ("gate:", "stopper:")


def import_readouts(options: argparse.Namespace) -> None:
    """Registers what is written as MODULE:NAME, and leaves its name in the options that use it."""
    for given in getattr(options, "with_readout", ()):
        if _name(given) == given:
            raise UserError(f"--with-readout takes MODULE:NAME, where a readout of your own is defined, got '{given}'.")
    for option in _OPTIONS:
        given = getattr(options, option, None)
        if isinstance(given, str):
            setattr(options, option, _name(given))
        elif isinstance(given, list):
            setattr(options, option, [_name(each) for each in given])


def _name(given: str) -> str:
    module, colon, attribute = given.partition(":")
    if not colon or given.startswith(_FITTED):
        return given
    from loopscope.exits.readouts import Readout, register_readout

    here = sys.path[:]
    sys.path.insert(0, "")  # as `python -m` does: the module may lie in the current folder
    try:
        found = getattr(import_module(module), attribute, None)
    except UserError:
        raise
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # one that it imports is missing
            raise UserError(f"The module of the readout '{given}' cannot be imported: {reason(error)}.") from error
        raise UserError(
            f"There is no module '{module}' for the readout '{given}'; it must be in the current folder, in "
            "PYTHONPATH, or installed."
        ) from None
    except Exception as error:
        raise UserError(f"The module of the readout '{given}' cannot be imported: {reason(error)}.") from error
    finally:
        sys.path[:] = here
    if not isinstance(found, Readout):
        raise UserError(f"'{given}' is not a readout: in {module}, {attribute} must be a loopscope.Readout.")
    return register_readout(found).name
