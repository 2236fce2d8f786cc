"""The main job with SERO as a user starts it: exact resume, exact neutrality, own environments, bad input."""

from __future__ import annotations

import json
import subprocess
import time

import numpy as np
import pytest
from train_test import (
    ROOT,
    assert_same_run,
    command,
    comparable,
    environment,
    final_state,
    train,
    trajectories,
    wait_for_update,
)

from covsero_jax import metrics

CONFIG = 'configs/alfworld_covsero.py:smoke'
FLAGS = ('--config.env.max_steps=12', '--config.sero.root_sampling=prioritised')

__all__ = ['environment']  # a fixture: imported to be used by name


def branches(workdir) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((workdir / 'branches').iterdir())}


@pytest.fixture(scope='session')
def reference(environment, tmp_path_factory):
    workdir = tmp_path_factory.mktemp('sero') / 'run'
    train(environment, workdir, *FLAGS, config=CONFIG)
    return workdir


def test_a_run_leaves_what_sero_did(reference):
    rows = metrics.read_metrics(reference)[1:]
    assert sum(row['oracle/valid'] for row in rows) > 0 and sum(row['loss/oracle'] for row in rows) > 0
    for name in ('oracle/roots', 'oracle/gated', 'oracle/steps', 'oracle/invalid/mismatch', 'time/oracle_s', 'time/oracle_wait_s'):
        assert all(name in row for row in rows)
    lines = [json.loads(line) for text in branches(reference).values() for line in text.splitlines()]
    assert len(lines) == sum(row['oracle/roots'] for row in rows)
    valid = [branch for branch in lines if not branch['invalid']]
    assert valid and all(branch['steps'][0]['weight'] == 1.0 and branch['gate'] == 1.0 for branch in valid)
    page = (reference / 'report.html').read_text()
    assert 'Oracle branches' in page and valid[-1]['steps'][0]['command'] in page


def test_kill_and_resume_is_bit_equal_to_never_stopping(environment, reference, tmp_path):
    workdir = tmp_path / 'run'
    run = subprocess.Popen(command(workdir, *FLAGS, config=CONFIG), cwd=ROOT, env=environment, stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE)
    wait_for_update(run, workdir, 2)
    time.sleep(0.2)
    run.kill()
    run.communicate()
    train(environment, workdir, *FLAGS, config=CONFIG)
    assert_same_run(workdir, reference)
    assert branches(workdir) == branches(reference)


def test_restoration_by_replay_is_the_same_run_without_workers_too(environment, reference, tmp_path):
    workdir = tmp_path / 'run'
    train(environment, workdir, *FLAGS, '--config.sero.restoration=replay', '--config.env.num_workers=0', config=CONFIG)
    assert branches(workdir) == branches(reference) and trajectories(workdir) == trajectories(reference)
    for name, value in final_state(reference).items():
        np.testing.assert_array_equal(final_state(workdir)[name], value)
    replayed = [row.pop('oracle/replayed_steps') for row in comparable(workdir)[1:]]
    assert sum(replayed) > 0


def test_with_coefficient_0_it_is_the_base_bit_for_bit(environment, reference, tmp_path):
    train(environment, tmp_path / 'zero', *FLAGS, '--config.sero.coef=0.0', config=CONFIG)
    train(environment, tmp_path / 'off', *FLAGS, '--config.sero.variant=off', config=CONFIG)
    assert trajectories(tmp_path / 'zero') == trajectories(tmp_path / 'off')
    zero, off = final_state(tmp_path / 'zero'), final_state(tmp_path / 'off')
    for name, value in off.items():
        np.testing.assert_array_equal(zero[name], value)
    assert any((value != off[name]).any() for name, value in final_state(reference).items())
    base = metrics.read_metrics(tmp_path / 'off')[-1]
    assert not any(name.startswith('oracle/') for name in base) and not (tmp_path / 'off' / 'branches').exists()


def own(environment):
    return {**environment, 'PYTHONPATH': str(ROOT / 'tests')}


def test_an_own_environment_with_an_oracle(environment, tmp_path):
    train(own(environment), tmp_path / 'run', '--config.env.name=own_oracle_env:make', '--config.updates=1', config=CONFIG)
    row = metrics.read_metrics(tmp_path / 'run')[-1]
    assert row['oracle/valid'] == row['oracle/roots'] > 0 and row['oracle/steps'] == row['oracle/valid']  # one command wins


def test_training_goes_on_when_the_oracle_raises(environment, tmp_path):
    train(own(environment), tmp_path / 'run', '--config.env.name=own_oracle_env:make_raising', '--config.updates=2',
          '--config.rollout.num_groups=6', config=CONFIG)
    rows = metrics.read_metrics(tmp_path / 'run')[1:]
    assert len(rows) == 2 and sum(row['oracle/invalid/oracle_failed'] for row in rows) > 0
    details = [json.loads(line)['detail'] for text in branches(tmp_path / 'run').values() for line in text.splitlines()]
    assert any('has lost its notes' in detail for detail in details)


@pytest.mark.parametrize('flags, message', [
    (['--config.sero.variant=flat'], 'full_flat'),
    (['--config.sero.oracle=expert'], 'planner'),
    (['--config.sero.restoration=guess'], 'copy, replay'),
    (['--config.sero.root_sampling=all'], 'prioritised'),
    (['--config.sero.nll=mean'], 'token_sum'),
    (['--config.sero.bank=absent.jsonl'], 'absent.jsonl'),
    (['--config.env.name=own_env:make_env'], 'no oracle_command'),
    (['--config.env.name=own_oracle_env:make_uncopyable'], 'sero.restoration=replay'),
])
def test_bad_configuration_is_named(environment, tmp_path, flags, message):
    run = train(own(environment), tmp_path / 'run', *flags, check=False, config=CONFIG)
    assert run.returncode != 0 and message in run.stdout + run.stderr
    assert 'Traceback' not in run.stderr
    assert not (tmp_path / 'run' / 'metrics.jsonl').exists()
