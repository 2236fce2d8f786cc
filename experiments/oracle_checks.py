"""What banks of oracle branches are measured by: restoration (SERO, C.1) and the reachability proxy (SERO, A.3).

Suffix letters: K replies sampled at a step, T depth inside a branch, Q steps of all branches.
"""

from __future__ import annotations

import collections
import itertools
import json
import os
import pathlib
import platform
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tqdm
from ml_collections import ConfigDict
from scipy import stats

from covsero_jax import metrics
from covsero_jax.prompts import PromptBuilder
from covsero_jax.trajectory import OracleBranch, Policy
from experiments import results, sero

NOT_VALIDATED = ('not restored', 'mismatch')
STEPS_LEFT = (1, 6, 11, 21, 10**9)  # bins [a, b) of the remaining budget
WEIGHT_BINS = (0.0, 0.01, 0.05, 0.2, 0.5, 1.0)  # (a, b] of w_j
RESAMPLES = 1000  # of the bootstrap
COLUMNS = ('branch', 'depth', 'compatibility', 'matched', 'weight', 'reproduced')

Report = dict[str, Any]


def origin(config: ConfigDict, policy: str) -> Report:
    """What a file was made from. policy: in words."""
    return {
        'policy': policy, 'seed': config.seed, 'oracle': config.sero.oracle, 'commit': results.commit(),
        'date': time.strftime('%Y-%m-%d'), 'machine': f'{os.cpu_count()} cores, {platform.machine()}',
        'config': json.loads(config.to_json_best_effort()),
    }


def write(path: pathlib.Path, report: Report) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    metrics.replace_file(path, json.dumps(report) + '\n')


# ---- restoration -----------------------------------------------------------------------------------------------------


def restoration(
    copies: Sequence[OracleBranch], replays: Sequence[OracleBranch], late: Sequence[OracleBranch],
    with_more_time: Sequence[OracleBranch],
) -> Report:
    """The same roots restored by copy and by replay: do both show what the policy saw, and what can be won from there?

    agree: roots for which both were validated (observation, admissible commands and prompt as recorded) or refused for
    the same reason, and were continued by the same commands through the same prompts and rewards. Of the validated
    copies, a *dead end* is a root where the oracle knows no plan; the others are *solvable*. `won` counts those that it
    solved within the remaining steps, `lost` the others by reason; `won_share_in_time` leaves those out that ran out of
    steps, which nothing could have won if the oracle's plans are shortest ones.
    late, with_more_time: the branches that ran out of steps, and what became of them with a longer horizon.
    """
    pairs = list(zip(copies, replays, strict=True))
    validated = [branch for branch in copies if branch.invalid not in NOT_VALIDATED]
    solvable = [branch for branch in validated if branch.steps or branch.invalid != 'no plan']
    won = [branch for branch in solvable if not branch.invalid]
    bins = [(low, high, [b for b in solvable if low <= b.root.steps_left < high])
            for low, high in itertools.pairwise(STEPS_LEFT)]
    return {
        'roots': len(pairs),
        'agree': sum(_played(a) == _played(b) for a, b in pairs),
        'validated': {'copy': len(validated), 'replay': sum(b.invalid not in NOT_VALIDATED for b in replays)},
        'invalid': {'copy': reasons(copies), 'replay': reasons(replays)},
        'dead_ends': len(validated) - len(solvable),
        'solvable': len(solvable),
        'won': len(won),
        'won_share': _share(len(won), len(solvable)),
        'won_share_in_time': _share(len(won), sum(branch.invalid != 'budget' for branch in solvable)),
        'lost': reasons(solvable),
        'by_steps_left': [{'steps_left': f'{low} to {high - 1}' if high < STEPS_LEFT[-1] else f'{low} or more',
                           'solvable': len(part), 'won': sum(not b.invalid for b in part)} for low, high, part in bins],
        'plan_length': _quartiles([len(branch.steps) for branch in won]),
        'out_of_budget': {
            'roots': len(late),
            'won_with_more_time': sum(not branch.invalid for branch in with_more_time),
            'steps_left': _quartiles([branch.root.steps_left for branch in late]),
            'steps_needed': _quartiles([len(branch.steps) for branch in with_more_time if not branch.invalid]),
        },
    }


def _played(branch: OracleBranch) -> tuple:
    return branch.invalid, [(s.observation, s.command, s.reward, s.prompt_tokens.tolist()) for s in branch.steps]


def reasons(branches: Sequence[OracleBranch]) -> dict[str, int]:
    """How many are invalid, by reason."""
    return dict(sorted(collections.Counter(branch.invalid for branch in branches if branch.invalid).items()))


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _quartiles(values: Sequence[int]) -> list[float] | None:
    """Smallest, quartiles, largest."""
    return np.quantile(values, [0, 0.25, 0.5, 0.75, 1]).tolist() if values else None


def restoration_table(report: Report) -> str:
    validated, late = report['validated'], report['out_of_budget']
    shares = report['won_share'], report['won_share_in_time']
    share, in_time = ('–' if value is None else f'{value:.1%}' for value in shares)
    lost = ', '.join(f'{n} {reason}' for reason, n in report['lost'].items()) or 'none'
    rows = [f'| {row["steps_left"]} | {row["solvable"]} | {row["won"]} |' for row in report['by_steps_left']]
    return f'''{report["roots"]} roots: copy and replay agree on {report["agree"]}
validated: {validated["copy"]} copies, {validated["replay"]} replays; dead ends: {report["dead_ends"]}
won: {report["won"]} of {report["solvable"]} solvable ones ({share}, in time {in_time}); not won: {lost}
out of budget: {late["roots"]}, with twice the horizon {late["won_with_more_time"]} of them are won
  (steps left {late["steps_left"]}, needed {late["steps_needed"]}: smallest, quartiles, largest)
| steps left | solvable | won |
|---|---|---|
''' + '\n'.join(rows)


# ---- the reachability proxy ------------------------------------------------------------------------------------------


def sample_matches(
    act: Policy, prompts: PromptBuilder, branches: Sequence[OracleBranch], samples: int
) -> list[np.ndarray]:
    """For each branch bool [K, T]: whether reply k at step j gives the oracle's command, read as the environment's is.

    The replies of a step are draws of (branch, k, step); those of different steps are independent, as in a rollout.
    """
    matches = []
    for r, branch in enumerate(tqdm.tqdm(branches, desc='branches', dynamic_ncols=True)):
        row_ids = np.array([(r, k, j) for k in range(samples) for j in range(len(branch.steps))], np.uint32)
        replies = act([step.prompt_tokens for step in branch.steps] * samples, row_ids)
        commands = [prompts.parse(reply.tokens, (), reply.truncated).command for reply in replies]
        wanted_T = np.array([step.command for step in branch.steps], object)
        matches.append(np.array(commands, object).reshape(samples, -1) == wanted_T)
    return matches


def reproduces_prefix(match_KT: np.ndarray) -> np.ndarray:
    """bool [K, T]: sample k gives all commands before step j; True at the root.

    While all commands have matched, the contexts of a rollout are those of the branch. So this has exactly the
    distribution of a rollout from the root, as far as the oracle's prefix goes.
    """
    before_KT = np.pad(match_KT[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return np.logical_and.accumulate(before_KT, axis=1)


def proxy(matches: Sequence[np.ndarray], weighed: sero.Weighed, *, seed: int) -> Report:
    """Does c_j rank how often the policy gives the oracle's command, and w_j how often it comes that far? SERO, A.3.

    `match`: Spearman's rank correlation of c_j with the match frequency, over all steps. `prefix`: of w_j with the
    frequency of reproducing the prefix, over all steps but roots, where both are 1 by definition; `bins` says the same
    in bins of w_j. Nothing claims that the values are equal: c is a mean per token. `rows`: one value per step.
    """
    lengths = [match_KT.shape[1] for match_KT in matches]
    place = np.repeat(np.arange(len(matches)), lengths), np.concatenate([np.arange(n) for n in lengths])
    rows = dict(zip(COLUMNS, (
        *place, np.exp(weighed.log_compat_RT[place]), np.concatenate([match_KT.mean(axis=0) for match_KT in matches]),
        weighed.reach_RT[place], np.concatenate([reproduces_prefix(m).mean(axis=0) for m in matches])), strict=True))
    later = {name: column_Q[rows['depth'] > 0] for name, column_Q in rows.items()}
    return {
        'branches': len(matches), 'steps': len(rows['depth']),
        'match': rank_correlation(rows['compatibility'], rows['matched'], rows['branch'], seed),
        'prefix': rank_correlation(later['weight'], later['reproduced'], later['branch'], seed),
        'bins': [_bin(later, low, high) for low, high in itertools.pairwise(WEIGHT_BINS)],
        'rows': {name: [float(f'{value:.4g}') for value in column_Q.tolist()] for name, column_Q in rows.items()},
    }


def rank_correlation(x_Q: np.ndarray, y_Q: np.ndarray, branch_Q: np.ndarray, seed: int) -> Report:
    """Spearman's rho, and its 95 % interval by resampling whole branches, whose steps are not independent.

    Where a column is constant there is no correlation: rho is None and `why` says so; such resamples do not count.
    """
    rho = _spearman(x_Q, y_Q)
    if rho is None:
        return {'rho': None, 'interval': None, 'why': f'the {len(x_Q)} values of a column are all equal'}
    rng = np.random.default_rng(seed)
    members = [np.flatnonzero(branch_Q == branch) for branch in np.unique(branch_Q)]
    drawn = []
    for _ in range(RESAMPLES):
        chosen_Q = np.concatenate([members[i] for i in rng.integers(len(members), size=len(members))])
        drawn.append(_spearman(x_Q[chosen_Q], y_Q[chosen_Q]))
    interval = np.quantile([value for value in drawn if value is not None], [0.025, 0.975])
    return {'rho': rho, 'interval': interval.tolist(), 'why': ''}


def _spearman(x_Q: np.ndarray, y_Q: np.ndarray) -> float | None:
    if not len(x_Q) or np.ptp(x_Q) == 0 or np.ptp(y_Q) == 0:
        return None
    return float(stats.spearmanr(x_Q, y_Q).statistic)


def _bin(rows: Mapping[str, np.ndarray], low: float, high: float) -> Report:
    inside_Q = (rows['weight'] > low) & (rows['weight'] <= high) | ((low == 0) & (rows['weight'] == 0))  # 0: underflow
    return {'low': low, 'high': high, 'steps': int(inside_Q.sum()), **{
        name: float(rows[name][inside_Q].mean()) if inside_Q.any() else None for name in ('weight', 'reproduced')}}


def proxy_table(report: Report) -> str:
    lines = [f'{report["steps"]} steps of {report["branches"]} branches']
    for name, what in (('match', 'c_j and matched commands'), ('prefix', 'w_j and reproduced prefixes')):
        measured = report[name]
        value = f'undefined ({measured["why"]})' if measured['rho'] is None else (
            f'{measured["rho"]:.3f} [{measured["interval"][0]:.3f}, {measured["interval"][1]:.3f}]')
        lines.append(f'Spearman rho of {what}: {value}')
    lines += ['| w_j | steps | mean w_j | prefix reproduced |', '|---|---|---|---|']
    for row in report['bins']:
        cells = ['–' if row[name] is None else f'{row[name]:.3f}' for name in ('weight', 'reproduced')]
        lines.append(f'| {row["low"]} to {row["high"]} | {row["steps"]} | {cells[0]} | {cells[1]} |')
    return '\n'.join(lines)
