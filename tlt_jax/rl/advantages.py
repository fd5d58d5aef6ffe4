"""Advantages of graded responses, on the host in float64: what a response was worth.

Estimators by name (`ESTIMATORS`), each f(rewards_N, groups_N, valid_N, lengths_N) -> [N]:
rewards_N float, anything where invalid; groups_N the integer group id of each response, wherever it
stands in the batch; valid_N bool; lengths_N response tokens. All give exactly 0 to invalid
responses and where the values compared are all equal. Reordering the responses reorders the result,
bit for bit. std is the sample standard deviation (divisor n - 1) everywhere, as in verl and TRL.
"""

from collections.abc import Iterator, Sequence

import numpy as np

EPS = 1e-6  # added to a standard deviation


def group(rewards_N, groups_N, valid_N, lengths_N):
    """A_i = (r_i - mean) / (std + eps) over the group (GRPO, arXiv 2402.03300, section 4.1.2)."""
    return _by_group(rewards_N, groups_N, valid_N, lambda r: (r - r.mean()) / (r.std(ddof=1) + EPS))


def group_mean(rewards_N, groups_N, valid_N, lengths_N):
    """A_i = r_i - mean over the group: no std, which would weigh up the prompts that are almost
    always or almost never answered (Dr.GRPO, arXiv 2503.20783)."""
    return _by_group(rewards_N, groups_N, valid_N, lambda r: r - r.mean())


def leave_one_out(rewards_N, groups_N, valid_N, lengths_N):
    """A_i = r_i - mean of the others of its group: a baseline that does not depend on the response
    itself (RLOO, arXiv 2402.14740)."""

    def estimate(r):
        return r - (r.sum() - r) / (len(r) - 1)

    return _by_group(rewards_N, groups_N, valid_N, estimate)


def batch(rewards_N, groups_N, valid_N, lengths_N):
    """A_i = (r_i - mean) / (std + eps), both over all tokens of the batch, each with the reward of
    its response (REINFORCE++, arXiv 2501.03262). One response per prompt is enough."""
    return _normalized(np.where(valid_N, rewards_N, 0.0), valid_N, lengths_N)


def batch_baseline(rewards_N, groups_N, valid_N, lengths_N):
    """The mean of the group subtracted, then normalised over the batch's tokens as `batch` does,
    mean included (REINFORCE++-baseline, arXiv 2501.03262)."""
    centred_N = group_mean(rewards_N, groups_N, valid_N, lengths_N)
    return _normalized(centred_N, valid_N, lengths_N)


ESTIMATORS = {
    "group": group,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "batch": batch,
    "batch_baseline": batch_baseline,
}
COMPARES_A_GROUP = ("group", "group_mean", "leave_one_out", "batch_baseline")


def batch_per_token(returns: Sequence[np.ndarray], valid_N: np.ndarray) -> list[np.ndarray]:
    """`batch` of returns that differ from token to token: N arrays [R] to N arrays [R]."""
    tokens = [np.asarray(x, np.float64) if ok else np.zeros(0) for x, ok in zip(returns, valid_N)]
    mean, scale = _moments(np.concatenate([*tokens, []]))
    return [
        (np.asarray(x, np.float64) - mean) * scale if ok else np.zeros(len(x))
        for x, ok in zip(returns, valid_N)
    ]


def overlong_penalty(lengths_N: np.ndarray, max_new_tokens: int, buffer: int) -> np.ndarray:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), float64 [N], to be added to
    the rewards.

    0 up to max_new_tokens - buffer tokens, falling linearly to -1 at max_new_tokens, where the
    responses that were cut off are too. A buffer of 0 punishes nothing.
    """
    if buffer == 0:
        return np.zeros(len(lengths_N))
    over_N = np.asarray(lengths_N, np.float64) - (max_new_tokens - buffer)
    return -np.clip(over_N / buffer, 0.0, 1.0)


def check(rewards_N, groups_N, valid_N, lengths_N) -> tuple[np.ndarray, ...]:
    """The four as arrays, rewards in float64.

    Raises ValueError on shapes that differ, group ids or lengths that are no integers, or a valid
    reward that is not finite.
    """
    rewards_N = np.asarray(rewards_N, np.float64)
    groups_N, valid_N, lengths_N = map(np.asarray, (groups_N, valid_N, lengths_N))
    shapes = [x.shape for x in (rewards_N, groups_N, valid_N, lengths_N)]
    if rewards_N.ndim != 1 or len(set(shapes)) > 1:
        raise ValueError(
            "rewards, groups, valid and lengths must be vectors of one length, got shapes "
            + ", ".join(map(str, shapes))
        )
    if (
        not np.issubdtype(groups_N.dtype, np.integer)
        or not np.issubdtype(lengths_N.dtype, np.integer)
        or valid_N.dtype != np.bool_
    ):
        raise ValueError(
            "group ids and lengths must be integers and valid bool, got "
            f"{groups_N.dtype}, {lengths_N.dtype}, {valid_N.dtype}"
        )
    bad = np.flatnonzero(valid_N & ~np.isfinite(rewards_N))
    if len(bad):
        raise ValueError(
            f"reward {rewards_N[bad[0]]} of response {bad[0]} is marked valid, not finite"
        )
    return rewards_N, groups_N, valid_N, lengths_N


def _by_group(rewards_N, groups_N, valid_N, estimate) -> np.ndarray:
    """`estimate` of the valid rewards of every group that has two that differ; 0 elsewhere."""
    advantages_N = np.zeros(len(rewards_N))
    for members in _groups(rewards_N, groups_N, valid_N):
        rewards = rewards_N[members]
        # Compared, not subtracted: the mean of equal rewards can differ from them by a rounding.
        if rewards[0] != rewards[-1]:
            advantages_N[members] = estimate(rewards)
    return advantages_N


def _groups(rewards_N, groups_N, valid_N) -> Iterator[np.ndarray]:
    """Indices of each group's valid members, by ascending reward.

    Sums over a group then cannot depend on the order in which responses arrive.
    """
    kept = np.flatnonzero(valid_N)
    kept = kept[np.lexsort((rewards_N[kept], groups_N[kept]))]
    starts = np.flatnonzero(np.diff(groups_N[kept])) + 1
    return (members for members in np.split(kept, starts) if len(members))


def _normalized(values_N, valid_N, lengths_N) -> np.ndarray:
    """Values of responses normalised over the tokens that have them; 0 where invalid."""
    tokens = np.repeat(values_N[valid_N], lengths_N[valid_N])
    mean, scale = _moments(tokens)
    return np.where(valid_N, (values_N - mean) * scale, 0.0)


def _moments(tokens: np.ndarray) -> tuple[float, float]:
    """mean and 1 / (std + eps); scale 0 where all are equal."""
    tokens = np.sort(tokens)  # a sum that no order of arrival can change
    if len(tokens) < 2 or tokens[0] == tokens[-1]:
        return 0.0, 0.0
    return tokens.mean(), 1.0 / (tokens.std(ddof=1) + EPS)
