"""Oracle branches on disk: collected once, then replayed by any number of runs (SERO, A.1, F.2).

A bank is one file of JSON lines: first what it was made from, then one branch per line. What a replay depends on, such as
tokenizer, environment and games, must be equal in the run that reads it.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from covsero_jax import metrics
from covsero_jax.trajectory import OracleBranch, OracleStep, Root

FORMAT = 1
MUST_MATCH = {  # what differs -> what to do
    'tokenizer': 'its token ids mean something else here',
    'environment': 'it was collected in another environment',
    'games': 'its tasks are not those of this run',
    'prompt': 'the policy of this run is shown other prompts',
    'horizon': 'its episodes have another number of steps',
}


class BankError(ValueError):
    """A bank that cannot be used; the message names the file, and what is wrong."""


def write_bank(path: pathlib.Path, branches: Sequence[OracleBranch], about: Mapping[str, object]) -> None:
    """about: JSON values, with at least the fields of MUST_MATCH. Snapshots of environments are not kept."""
    missing = MUST_MATCH.keys() - about.keys()
    if missing:
        raise ValueError(f'a bank must say what it was made from; missing: {", ".join(sorted(missing))}')
    lines = [json.dumps({'format': FORMAT, **about}), *(json.dumps(_to_json(branch)) for branch in branches)]
    path.parent.mkdir(parents=True, exist_ok=True)
    metrics.replace_file(path, '\n'.join(lines) + '\n')


def read_bank(path: pathlib.Path, expected: Mapping[str, object]) -> tuple[list[OracleBranch], dict[str, object]]:
    """(branches, what the bank says about itself). Raises BankError unless it was made from what `expected` says."""
    try:
        lines = path.read_text().splitlines()
        about, *rows = [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise BankError(f'{path}: not a bank of oracle branches ({error}); make one with '
                        'python -m experiments.oracle_bank collect') from error
    if not isinstance(about, dict) or about.get('format') != FORMAT:
        raise BankError(f'{path}: not a bank of format {FORMAT}; collect it again')
    for name, meaning in MUST_MATCH.items():
        if about.get(name) != expected[name]:
            raise BankError(f'{path}: {name} is {about.get(name)!r}, here it is {expected[name]!r}: {meaning}. '
                            'Collect a bank with this configuration')
    try:
        branches = [_from_json(row) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise BankError(f'{path}: a damaged branch ({error!r}); collect it again') from error
    if not branches:
        raise BankError(f'{path}: this bank has no branches')
    return branches, about


def _to_json(branch: OracleBranch) -> dict[str, object]:
    root = {name: value for name, value in vars(branch.root).items() if name != 'snapshot'}
    steps = [
        vars(step) | {name: getattr(step, name).tolist() for name in ('prompt_tokens', 'reply_tokens')}
        | {'command_mask': step.command_mask.astype(int).tolist()}
        for step in branch.steps
    ]
    return {'root': root | {'prompt_tokens': branch.root.prompt_tokens.tolist()}, 'steps': steps,
            'invalid': branch.invalid, 'detail': branch.detail}


def _from_json(row: dict) -> OracleBranch:
    root = row['root'] | {
        'prompt_tokens': np.array(row['root']['prompt_tokens'], np.int32),
        'commands': tuple(row['root']['commands']),
        'admissible': tuple(row['root']['admissible']),
        'history': tuple((seen, done) for seen, done in row['root']['history']),
    }
    steps = [
        OracleStep(**step | {name: np.array(step[name], np.int32) for name in ('prompt_tokens', 'reply_tokens')}
                   | {'command_mask': np.array(step['command_mask'], bool)})
        for step in row['steps']
    ]
    return OracleBranch(Root(**root), tuple(steps), row['invalid'], row['detail'])
