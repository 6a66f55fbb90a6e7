"""Phases of training and the sudden rise, found from the accuracy curves (paper, section 4).

An accuracy table has one row a checkpoint: step, then one column a split.
"""

import numpy as np
import pandas as pd

LASTING_STEPS, LASTING_CHECKPOINTS = 500, 3  # how long an accuracy must hold to count as reached
SMALLEST_SPIKE = 0.1  # rise of accuracy between two checkpoints

PHASES = {
    "addition": {"0var_add_restricted": 0.9},
    "assignment": {"1var_add_restricted": 0.9, "2var_add_restricted": 0.8},
    "refinement": {"1var_var_restricted": 0.95, "2var_var_restricted_1": 0.95, "2var_var_restricted_2": 0.95},
}


def first_lasting(steps: np.ndarray, reached: np.ndarray) -> int | None:
    """The first checkpoint from which on something holds for at least 500 steps and 3 checkpoints.

    That is: at every checkpoint of the shortest window that starts there, has at least 3 checkpoints, and whose last is
    at least 500 steps after its first. What comes later does not matter. A window that the run's end cuts off does not
    count, so that nothing is reached in the last 500 steps or at the last two checkpoints.

    Args:
        steps: [n] of the checkpoints, increasing.
        reached: [n] whether it holds there.
    """
    for first, step in enumerate(steps):
        last = max(first + LASTING_CHECKPOINTS - 1, int(np.searchsorted(steps, step + LASTING_STEPS)))
        if last < len(steps) and reached[first : last + 1].all():
            return int(step)
    return None


def phases(accuracy: pd.DataFrame) -> dict[str, int | None]:
    """The first step of each phase; None where it is not reached, or where a split that it needs is absent."""
    steps = accuracy.step.to_numpy()
    found: dict[str, int | None] = {}
    for phase, thresholds in PHASES.items():
        splits = accuracy.reindex(columns=list(thresholds))  # an absent split is never at its threshold
        found[phase] = first_lasting(steps, (splits >= pd.Series(thresholds)).all(axis=1).to_numpy())
    return found


def spike(accuracy: pd.DataFrame, addition: int | None) -> tuple[int | None, int | None]:
    """The two consecutive checkpoints, from `addition` on, between which 1var_add_restricted rises most.

    Returns:
        their steps, or None twice where it rises by less than 0.1, or `addition` is None, or the split is absent.
    """
    if addition is None or "1var_add_restricted" not in accuracy:
        return None, None
    after = accuracy[accuracy.step >= addition].reset_index(drop=True)
    rises = after["1var_add_restricted"].diff().round(6)  # as many digits as accuracies are written with
    if not rises.max() >= SMALLEST_SPIKE:
        return None, None
    top = int(rises.idxmax())
    return int(after.step[top - 1]), int(after.step[top])


def moments(accuracy: pd.DataFrame) -> dict[str, int | None]:
    """Phases, spike, and the steps from 99 % of 0var_train to `addition` (grokking delay), each None if not there."""
    found = phases(accuracy)
    before, after = spike(accuracy, found["addition"])
    fitted = accuracy.step[accuracy.reindex(columns=["0var_train"])["0var_train"] >= 0.99]
    known = found["addition"] is not None and len(fitted) > 0
    delay = int(found["addition"] - fitted.iloc[0]) if known else None
    return {**found, "spike_before": before, "spike": after, "grokking_delay": delay}
