"""Banks of oracle branches: what is read is what was written, and what cannot be used says why."""

from __future__ import annotations

import dataclasses
import functools
import json

import hypothesis
import numpy as np
import pytest
import scripted
from hypothesis import strategies as st

from covsero_jax import bank, oracle, rollout, workers
from covsero_jax.envs import keydoor
from covsero_jax.trajectory import OracleBranch, OracleStep, Root

ABOUT = {
    'tokenizer': 'bytes', 'environment': 'keydoor', 'games': 'six', 'prompt': 'json', 'horizon': 'long', 'policy': 'random',
}
MAX_STEPS = 12

texts = st.text(max_size=12)  # with line ends and separators of every alphabet
numbers = st.integers(0, 2**31 - 1)
rewards = st.floats(allow_nan=False)
tokens = st.lists(numbers, min_size=1, max_size=5).map(lambda ids: np.array(ids, np.int32))
masks = st.lists(st.booleans(), min_size=1, max_size=5).map(lambda bits: np.array(bits, bool))
roots = st.builds(
    Root, group=numbers, trajectory=numbers, step=numbers, task_id=numbers, observation=texts,
    commands=st.lists(texts, max_size=3).map(tuple), admissible=st.lists(texts, max_size=3).map(tuple),
    history=st.lists(st.tuples(texts, texts), max_size=3).map(tuple), prompt_tokens=tokens, steps_left=numbers,
    policy_return=rewards)
steps = st.builds(OracleStep, prompt_tokens=tokens, reply_tokens=tokens, command_mask=masks, observation=texts,
                  command=texts, reward=rewards)
branches_of_anything = st.lists(
    st.builds(OracleBranch, root=roots, steps=st.lists(steps, max_size=3).map(tuple),
              invalid=st.sampled_from(('', *oracle.INVALID)), detail=texts), min_size=1, max_size=3)


def plain(x):
    """Nested built-in values with their types, arrays as (dtype, bytes), without snapshots: == compares everything."""
    if isinstance(x, np.ndarray):
        return x.dtype.str, x.tobytes()
    if dataclasses.is_dataclass(x):
        return type(x), {name: plain(value) for name, value in vars(x).items() if name != 'snapshot'}
    return (type(x), *map(plain, x)) if isinstance(x, (list, tuple)) else (type(x), x)


@pytest.fixture(scope='module')
def branches():
    """Real ones: valid, and out of budget."""
    with workers.WorkerPool(functools.partial(keydoor.KeyDoorEnv, oracle=True), num_envs=12, num_workers=0,
                            timeout_s=60.0) as pool:
        prompts = scripted.JsonPrompts()
        groups = rollout.collect_groups(pool, scripted.RandomPolicy(), prompts, range(6), group_size=4,
                                        max_steps=MAX_STEPS, keep_snapshots=True)
        chosen = [oracle.make_root(groups, g, k, len(trajectory.steps) - 1, max_steps=MAX_STEPS)
                  for g, group in enumerate(groups) for k, trajectory in enumerate(group.trajectories)]
        chosen += oracle.sample_roots(groups, np.random.default_rng(0), max_steps=MAX_STEPS, sampling='prioritised',
                                      task_types=pool.task_types)
        return oracle.collect_branches(pool, prompts, chosen, max_target=99)


@pytest.fixture
def file(branches, tmp_path):
    bank.write_bank(tmp_path / 'new' / 'bank.jsonl', branches, ABOUT)
    return tmp_path / 'new' / 'bank.jsonl'


def test_real_branches_come_back(branches, file):
    assert {branch.invalid for branch in branches} >= {'', 'budget'} and branches[0].root.snapshot is not None
    read, about = bank.read_bank(file, ABOUT)
    assert plain(read) == plain(branches) and about == {'format': bank.FORMAT, **ABOUT}
    assert all(branch.root.snapshot is None for branch in read)
    assert [branch.oracle_return for branch in read] == [branch.oracle_return for branch in branches]


@hypothesis.given(branches_of_anything)
@hypothesis.settings(deadline=None, max_examples=60)
def test_any_branches_come_back(tmp_path_factory, branches):
    file = tmp_path_factory.mktemp('bank') / 'bank.jsonl'
    bank.write_bank(file, branches, ABOUT)
    assert plain(bank.read_bank(file, ABOUT)[0]) == plain(branches)
    assert len(file.read_text().splitlines()) == 1 + len(branches)


def test_the_same_branches_make_the_same_file(branches, file, tmp_path):
    bank.write_bank(tmp_path / 'again', bank.read_bank(file, ABOUT)[0], ABOUT)
    assert (tmp_path / 'again').read_bytes() == file.read_bytes()


@pytest.mark.parametrize('name', bank.MUST_MATCH)
def test_a_bank_of_something_else_is_refused(file, name):
    message = f"bank.jsonl: {name} is '{ABOUT[name]}', here it is 'other': .*Collect a bank"
    with pytest.raises(bank.BankError, match=message):
        bank.read_bank(file, ABOUT | {name: 'other'})


def test_what_need_not_match_is_free(file):
    bank.read_bank(file, ABOUT | {'policy': 'another'})


@pytest.mark.parametrize('name', bank.MUST_MATCH)
def test_nothing_is_written_without_saying_what_it_is_from(branches, tmp_path, name):
    with pytest.raises(ValueError, match=f'missing: {name}'):
        bank.write_bank(tmp_path / 'bank', branches, {key: value for key, value in ABOUT.items() if key != name})
    assert not (tmp_path / 'bank').exists()


def damaged(change):
    """The lines of a bank with the first branch changed."""
    def apply(lines):
        row = json.loads(lines[1])
        change(row)
        return [lines[0], json.dumps(row), *lines[2:]]

    return apply


@pytest.mark.parametrize(('change', 'message'), [
    (lambda lines: [], 'not a bank'),
    (lambda lines: ['a table of figures'], 'not a bank'),
    (lambda lines: ['[1, 2]'], 'format 1; collect it again'),
    (lambda lines: ['{"update": 1}'], 'format 1; collect it again'),
    (lambda lines: [lines[0].replace('"format": 1', '"format": 2'), *lines[1:]], 'format 1; collect it again'),
    (lambda lines: lines[:1], 'has no branches'),
    (lambda lines: [*lines[:-1], lines[-1][:-9]], 'not a bank'),
    (lambda lines: [lines[0], '[]', *lines[2:]], 'damaged branch'),
    (damaged(lambda row: row.pop('steps')), 'damaged branch'),
    (damaged(lambda row: row['root'].pop('steps_left')), 'damaged branch'),
    (damaged(lambda row: row['root'].update(colour='red')), 'damaged branch'),
    (damaged(lambda row: row['root'].update(prompt_tokens=['a'])), 'damaged branch'),
    (damaged(lambda row: row['root'].update(history=[['once']])), 'damaged branch'),
    (damaged(lambda row: row['steps'][0].update(reply_tokens=None)), 'damaged branch'),
])  # fmt: skip
def test_a_damaged_bank_names_its_file(file, change, message):
    file.write_text(''.join(line + '\n' for line in change(file.read_text().splitlines())))
    with pytest.raises(bank.BankError, match=f'{file}: .*{message}'):
        bank.read_bank(file, ABOUT)


@pytest.mark.parametrize('content', [None, b'\xff\xfe\x00'], ids=['missing', 'binary'])
def test_no_text_no_bank(tmp_path, content):
    if content is not None:
        (tmp_path / 'bank').write_bytes(content)
    with pytest.raises(bank.BankError, match=f'{tmp_path}/bank: .*oracle_bank collect'):
        bank.read_bank(tmp_path / 'bank', ABOUT)
