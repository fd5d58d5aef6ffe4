"""Group-relative advantages of GRPO (arXiv 2402.03300, section 4.1.2)."""

import numpy as np


def group_advantages(
    rewards_N: np.ndarray,
    groups_N: np.ndarray,
    valid_N: np.ndarray,
    *,
    normalize_std: bool = True,
    eps: float = 1e-6,
) -> np.ndarray:
    """Return A_i = (r_i - mean) / (std + eps) over the valid members of i's group, float64 [N].

    rewards_N: float; anything, NaN too, where invalid. groups_N: the integer group id of each
    response, wherever it stands in the batch. valid_N: bool. std is the sample standard deviation
    (divisor n - 1), as in verl and TRL; without `normalize_std` nothing is divided (Dr.GRPO,
    arXiv 2503.20783). Exactly 0 for invalid responses and for groups whose valid rewards are all
    equal or fewer than two. Reordering the responses reorders the result, bit for bit.
    Raises ValueError on shapes that differ, group ids that are no integers, or a valid reward that
    is not finite.
    """
    rewards_N = np.asarray(rewards_N, np.float64)
    groups_N, valid_N = np.asarray(groups_N), np.asarray(valid_N)
    if not rewards_N.ndim == 1 or not rewards_N.shape == groups_N.shape == valid_N.shape:
        raise ValueError(
            "rewards, groups and valid must be vectors of one length, got shapes "
            f"{rewards_N.shape}, {groups_N.shape}, {valid_N.shape}"
        )
    if not np.issubdtype(groups_N.dtype, np.integer) or valid_N.dtype != np.bool_:
        raise ValueError(
            f"group ids must be integers and valid bool, got {groups_N.dtype}, {valid_N.dtype}"
        )
    kept = np.flatnonzero(valid_N)
    if not np.isfinite(rewards_N[kept]).all():
        bad = kept[~np.isfinite(rewards_N[kept])][0]
        raise ValueError(f"reward {rewards_N[bad]} of response {bad} is marked valid, not finite")

    advantages_N = np.zeros_like(rewards_N)
    # Within a group the sums below run over ascending rewards, so they cannot depend on the order
    # in which responses arrive.
    kept = kept[np.lexsort((rewards_N[kept], groups_N[kept]))]
    starts = np.flatnonzero(np.diff(groups_N[kept])) + 1
    for members in np.split(kept, starts):
        rewards = rewards_N[members]
        # Compared, not subtracted: the mean of equal rewards can differ from them by a rounding.
        if len(members) < 2 or rewards[0] == rewards[-1]:
            continue
        advantages_N[members] = rewards - rewards.mean()
        if normalize_std:
            advantages_N[members] /= rewards.std(ddof=1) + eps
    return advantages_N
