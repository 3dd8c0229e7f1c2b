"""How deep should a request be answered? `loopscope_depth` in its `vllm_xargs` sets it, checked when it arrives.

The value is "full", a number of loops, or the name of a policy of the deployment:

    client.completions.create(model=..., prompt=..., extra_body={"vllm_xargs": {"loopscope_depth": 2}})

A request without a value gets the deployment's default: its policy, or all loops.
"""

from collections.abc import Mapping
from typing import Any

from loopscope.errors import UserError
from loopscope.integrations.vllm.deployment import FULL_DEPTH, Deployment
from loopscope.policy import ExitPolicy

DEPTH_KEY = "loopscope_depth"
_MISTAKEN = {"depth", "loops", "num_loops", "policy", "threshold", "exit_threshold", "exit_at_step", "total_ut_steps"}
"""Arguments that other software uses for a depth; vLLM would ignore them silently."""

Depth = str | int | None
"""The depth of a request: "full", a number of loops, the name of a policy; None: the deployment's default."""


def requested_depth(arguments: Mapping[str, Any] | None) -> Depth:
    """The depth in the arguments of a request; None if it gives none."""
    return (arguments or {}).get(DEPTH_KEY)


def check_depth(arguments: Mapping[str, Any] | None, deployment: Deployment) -> None:
    """Reject a depth that this deployment does not offer, and misspelt arguments."""
    for name in arguments or {}:
        if name != DEPTH_KEY and (name.startswith("loopscope") or name in _MISTAKEN):
            raise UserError(f"Unknown argument '{name}' in vllm_xargs; a depth is asked for as '{DEPTH_KEY}'.")
    depth = requested_depth(arguments)
    if depth is None:
        return
    if not deployment.adaptive:
        raise UserError(
            f"This deployment answers every request with {deployment.loops} loops; to let requests choose "
            f'({DEPTH_KEY}), start it with an exit policy or with "policies" in hf_overrides.'
        )
    names = [FULL_DEPTH, *deployment.policies]
    known = depth in names if isinstance(depth, str) else type(depth) is int and 1 <= depth <= deployment.loops
    if not known:
        offered = ", ".join(f"'{name}'" for name in names)
        raise UserError(f"{DEPTH_KEY} is a number of loops from 1 to {deployment.loops}, or {offered}; got {depth!r}.")


def policy_of(depth: Depth, deployment: Deployment) -> ExitPolicy:
    """The policy under which the tokens of a request exit."""
    if depth is None and deployment.policy is not None:
        return deployment.policy
    if isinstance(depth, str) and depth != FULL_DEPTH:
        return deployment.policies[depth]
    return ExitPolicy("fixed", depth if isinstance(depth, int) else deployment.loops)
