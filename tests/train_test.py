"""The main job as a user starts it: real processes, real files, on the smoke preset."""

from __future__ import annotations

import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from covsero_jax import checkpoint, metrics, pretrained

ROOT = pathlib.Path(__file__).parent.parent
UPDATES = 3


@pytest.fixture(scope='session')
def environment(tmp_path_factory):
    """A newcomer's machine: an empty cache, one CPU device. Compiled programs are shared between these tests."""
    return {**os.environ, 'COVSERO_CACHE': str(tmp_path_factory.mktemp('cache')), 'JAX_PLATFORMS': 'cpu'}


def command(workdir, *flags: str, config: str = 'configs/alfworld_covgpo.py:smoke') -> list[str]:
    return [sys.executable, '-m', 'experiments.train', f'--config={config}', f'--workdir={workdir}',
            f'--config.updates={UPDATES}', '--config.eval.every=3', *flags]


def train(environment, workdir, *flags: str, check: bool = True, **kwargs) -> subprocess.CompletedProcess:
    run = subprocess.run(command(workdir, *flags, **kwargs), cwd=ROOT, env=environment, capture_output=True, text=True,
                         timeout=600, check=False)
    assert run.returncode == 0 or not check, run.stdout + run.stderr
    return run


def wait_for_update(run: subprocess.Popen, workdir: pathlib.Path, update: int) -> None:
    deadline = time.time() + 300
    while time.time() < deadline and run.poll() is None:
        path = workdir / 'metrics.jsonl'
        if path.exists() and any(row['update'] == update for row in metrics.read_metrics(workdir)):
            return
        time.sleep(0.05)
    raise AssertionError(f'update {update} never came: {run.communicate()}')


def comparable(workdir) -> list[dict]:
    """The metrics without clocks and compilation counts."""
    return [{name: value for name, value in row.items() if not name.startswith(('time/', 'compiled/'))}
            for row in metrics.read_metrics(workdir)]


def trajectories(workdir) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((workdir / 'trajectories').iterdir())}


def final_state(workdir) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp

    restored = ocp.StandardCheckpointer().restore(workdir / 'checkpoints' / str(UPDATES) / 'state')
    import jax

    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(restored)}


def assert_same_run(a: pathlib.Path, b: pathlib.Path) -> None:
    assert comparable(a) == comparable(b)
    assert trajectories(a) == trajectories(b)
    state_a, state_b = final_state(a), final_state(b)
    assert state_a.keys() == state_b.keys() and len(state_a) > 20
    for name, value in state_a.items():
        np.testing.assert_array_equal(value, state_b[name], err_msg=name)


@pytest.fixture(scope='session')
def reference(environment, tmp_path_factory):
    """The uninterrupted run that the others are compared with."""
    workdir = tmp_path_factory.mktemp('reference') / 'run'
    run = train(environment, workdir)
    assert f'results: {workdir}/report.html' in run.stdout
    return workdir


def test_a_run_leaves_everything_a_person_looks_for(reference):
    rows = metrics.read_metrics(reference)
    assert [row['update'] for row in rows] == [0, 1, 2, 3]
    for name in ('rollout/success_rate', 'group/all_failed_share', 'gate/step/zero_score', 'gate/trajectory/triggered',
                 'gate/step/gap_violations', 'loss/kl', 'update/grad_norm', 'batch/pad_fraction', 'time/rollout_s',
                 'time/learn_s', 'coverage/failed'):
        assert name in rows[1], name
    assert {'eval/valid_seen/success_rate', 'eval/valid_unseen/success_rate'} <= rows[0].keys() & rows[3].keys()
    assert len(trajectories(reference)) == UPDATES
    episode = json.loads((reference / 'trajectories' / 'update_00001.jsonl').read_text().splitlines()[0])
    assert {'task', 'success', 'steps'} <= episode.keys()
    assert {'observation', 'reply', 'command', 'advantage', 'coverage', 'gate_open'} <= episode['steps'][0].keys()
    for name in ('report.html', 'learning_curve.png', 'config.json', 'tensorboard'):
        assert (reference / name).exists()


def test_the_parameters_were_trained(reference):
    _, before = pretrained.load_folder(ROOT / 'covsero_jax' / 'assets' / 'tiny')
    after = final_state(reference)["['params']['embed']['embedding']"]
    assert np.abs(after - before['embed']['embedding']).max() > 1e-5
    assert sum(row.get('update/skipped', 0) for row in metrics.read_metrics(reference)) == 0


def test_sampler_and_learner_agree_on_the_policy(reference):
    assert 0 < max(row['logprob/sampler_gap_max'] for row in metrics.read_metrics(reference)[1:]) <= 1e-4


def test_compilations_stop_after_the_first_updates(reference):
    compiled = [row['compiled/programs'] for row in metrics.read_metrics(reference)[1:]]
    assert compiled[-1] <= compiled[0] + 4, compiled  # a longer prompt may still open a bucket; a leak adds every update


def test_a_second_start_finds_its_programs_compiled(environment, reference, tmp_path):
    """Those that take long to compile; short ones are not kept."""
    del reference  # it was the first start
    log = train(environment | {'JAX_LOG_COMPILES': '1', 'JAX_EXPLAIN_CACHE_MISSES': '1'}, tmp_path / 'run').stderr
    hit, missed = (set(re.findall(f"{event} for '([a-z_]+)'", log)) for event in ('cache hit', 'CACHE MISS'))
    long = {'jit_generate', 'jit_accumulate', 'jit_logprob_step', 'jit_apply'}
    assert long <= hit, log[-2000:]
    assert not long & missed


def test_kill_and_resume_is_bit_equal_to_never_stopping(environment, reference, tmp_path):
    workdir = tmp_path / 'run'
    for update in (1, 2):
        run = subprocess.Popen(command(workdir), cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        wait_for_update(run, workdir, update)
        time.sleep(0.3 * update)  # somewhere inside the next update
        run.kill()
        run.communicate()
    resumed = train(environment, workdir)
    assert 'continuing' in resumed.stdout
    assert_same_run(workdir, reference)


def test_sigterm_saves_and_leaves_cleanly(environment, reference, tmp_path):
    workdir = tmp_path / 'run'
    run = subprocess.Popen(command(workdir), cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                           text=True)
    wait_for_update(run, workdir, 1)
    run.send_signal(signal.SIGTERM)
    out, err = run.communicate(timeout=120)
    assert run.returncode == 0 and 'the same command continues' in out + err
    train(environment, workdir)
    assert_same_run(workdir, reference)


@pytest.mark.slow
@pytest.mark.parametrize('num_workers', [0, 4])
def test_the_same_run_for_any_number_of_workers(environment, reference, tmp_path, num_workers):
    workdir = tmp_path / 'run'
    train(environment, workdir, f'--config.env.num_workers={num_workers}')
    assert_same_run(workdir, reference)


@pytest.mark.slow
def test_another_seed_is_another_run(environment, reference, tmp_path):
    train(environment, tmp_path / 'run', '--config.seed=1')
    assert trajectories(tmp_path / 'run') != trajectories(reference)


def job(environment, module: str, *flags: str) -> str:
    run = subprocess.run([sys.executable, '-m', f'experiments.{module}', '--config=configs/alfworld_covgpo.py:smoke', *flags],
                         cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_an_exported_folder_scores_as_its_checkpoint(environment, reference, tmp_path):
    job(environment, 'export', f'--workdir={reference}', '--which=latest', f'--out={tmp_path / "model"}')
    out = job(environment, 'evaluate', f'--workdir={reference}', '--which=latest', f'--out={tmp_path / "a.json"}')
    job(environment, 'evaluate', f'--model={tmp_path / "model"}', f'--out={tmp_path / "b.json"}')
    a, b = (json.loads((tmp_path / name).read_text()) for name in ('a.json', 'b.json'))
    assert a['splits'] == b['splits'] and set(a['splits']) == {'valid_seen', 'valid_unseen'}
    assert a['splits']['valid_seen']['num_games'] == 12 and len(a['splits']['valid_seen']['manifest_hash']) == 64
    last = metrics.read_metrics(reference)[-1]
    assert last['eval/valid_seen/success_rate'] == a['splits']['valid_seen']['success_rate']
    assert 'pick_two_obj_and_place' in out and '(0/2)' in out


def test_an_own_environment_trains_by_its_name(environment, tmp_path):
    with_tests = {**environment, 'PYTHONPATH': str(ROOT / 'tests')}
    train(with_tests, tmp_path / 'run', '--config.env.name=own_env:make_env', '--config.updates=1')
    rows = metrics.read_metrics(tmp_path / 'run')
    assert rows[-1]['eval/valid_seen/num_games'] == 6 and 'eval/valid_seen/success_rate/low' in rows[-1]


# ---- bad input: each is refused before any long work, by name


@pytest.mark.parametrize('flags, message', [
    (['--config.rollout.groups=3'], 'no configuration field groups'),
    (['--config.model.path=absent/folder'], 'absent/folder'),
    (['--config.env.data=absent/data'], 'absent/data'),
    (['--config.advantage.estimator=ppo'], 'gigpo'),
    (['--config.coverage.mode=loose'], 'ideal'),
    (['--config.loss.aggregation=sum'], 'token'),
    (['--config.learner.micro_batch=7'], 'learner.micro_batch=7'),
    (['--config.env.difficulty=huge'], 'medium'),
    (['--config.env.name=no_such_module:make_env'], 'no_such_module:make_env'),
])
def test_bad_configuration_is_named(environment, tmp_path, flags, message):
    run = train(environment, tmp_path / 'run', *flags, check=False)
    assert run.returncode != 0 and message in run.stdout + run.stderr
    assert not (tmp_path / 'run' / 'metrics.jsonl').exists()


@pytest.mark.parametrize('preset, message', [('1.5b', 'hf download Qwen/Qwen2.5-1.5B-Instruct'),
                                             ('7b', 'hf download Qwen/Qwen2.5-7B-Instruct'), ('13b', 'smoke')])
def test_presets_that_cannot_run_here_say_what_is_missing(environment, tmp_path, preset, message):
    run = train(environment, tmp_path / 'run', config=f'configs/alfworld_covgpo.py:{preset}', check=False)
    assert run.returncode != 0 and message in run.stdout + run.stderr


def test_a_checkpoint_of_another_model_is_refused(environment, reference, tmp_path):
    config, params = pretrained.load_folder(ROOT / 'covsero_jax' / 'assets' / 'tiny')
    import dataclasses

    import jax

    from covsero_jax import model

    other = dataclasses.replace(config, mlp_dim=config.mlp_dim // 2)
    pretrained.save_folder(tmp_path / 'other', other, model.init_params(other, jax.random.key(0)),
                           tokenizer_from=ROOT / 'covsero_jax' / 'assets' / 'tiny')
    run = train(environment, reference, f'--config.model.path={tmp_path / "other"}', check=False)
    assert run.returncode != 0 and 'run of another model' in run.stderr
    assert len(metrics.read_metrics(reference)) == UPDATES + 1


def test_a_full_disk_loses_nothing_that_was_saved(tmp_path):
    import jax.numpy as jnp

    saved = checkpoint.Checkpoints(tmp_path, keep=2)
    state = {'params': jnp.asarray(np.random.default_rng(0).random((1500, 1000), np.float32))}
    saved.save(1, state, {'update': 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # writes beyond fail, as on a full disk
    try:
        with pytest.raises(checkpoint.CheckpointError, match='last whole one is 1'):
            saved.save(2, state, {'update': 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    saved.close()
    again = checkpoint.Checkpoints(tmp_path, keep=2)
    assert again.latest() == 1
    np.testing.assert_array_equal(again.restore(1, state)['params'], state['params'])
    again.save(2, state, {'update': 2})
    assert again.latest() == 2
    again.close()
