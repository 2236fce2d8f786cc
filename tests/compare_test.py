"""Comparisons: variants by name, resumable, paired; tables from files."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from experiments import compare, compare_tables, results, wiring

ROOT = pathlib.Path(__file__).parent.parent


def test_a_variant_is_flags():
    assert compare.overrides('hgpo+shuffle+coverage.coverage_scale=0.5') == [
        '--config.experiment=hgpo+shuffle+coverage.coverage_scale=0.5', '--config.advantage.estimator=hgpo',
        '--config.coverage.variant=shuffle', '--config.coverage.coverage_scale=0.5']
    config = compare.build(['--config=configs/alfworld_gigpo.py:smoke', *compare.overrides('rloo+random_h+seed=3')])
    assert (config.advantage.estimator, config.coverage.variant, config.seed) == ('rloo', 'random_h', 3)


@pytest.mark.parametrize(('variant', 'message'), [
    ('gigpo+coverge', "'coverge' is neither an estimator .*reinforce_pp.* nor a coverage variant .*shuffle_h"),
    ('ppo', "'ppo' is neither an estimator"),
    ('', "'' is neither"),
])  # fmt: skip
def test_names_that_do_not_exist_list_those_that_do(variant, message):
    with pytest.raises(wiring.ConfigError, match=message):
        compare.overrides(variant)


def test_options_of_an_estimator_are_fields_like_any_other():
    config = compare.build(['--config=configs/alfworld_gigpo.py:smoke', *compare.overrides(
        'hgpo+advantage.options.hgpo.weight_offset=2+advantage.episode_stats=rows')])
    assert config.advantage.options.hgpo.weight_offset == 2 and config.advantage.options.gigpo.step_weight == 1.0


def test_files_of_before_a_field_existed_still_count(tmp_path):
    arguments = ['--config=configs/alfworld_gigpo.py:smoke']
    config = json.loads(compare.build([*arguments, *compare.overrides('gigpo'), '--config.seed=0']).to_json_best_effort())
    del config['rollout']['band_mix'], config['advantage']['options']
    file = tmp_path / 'gigpo-seed0.json'
    file.write_text(json.dumps(result('gigpo', 0, 30) | {'config': config}))
    assert compare.plan(['gigpo'], 1, tmp_path, arguments) == []
    with pytest.raises(wiring.ConfigError, match='gigpo-seed0.json was made with other settings .rollout.group_size 4 -> 3'):
        compare.plan(['gigpo'], 1, tmp_path, [*arguments, '--config.rollout.group_size=3'])


@pytest.mark.parametrize(('override', 'message'), [
    ('coverage.variant=half', 'coverage: variant is .half.; choose one of'),
    ('loss.policy_loss=reinforce', "loss: policy_loss='reinforce' is not one of"),
    ('advantage.normalisation=max', 'advantage.normalisation=.max.; there are mean_std, mean'),
    ('env.observation=rich', 'env.observation=.rich.; there are raw, enriched, enriched_state'),
    ('rollout.group_size=1', 'rollout.group_size=1: a group of one has nothing to be compared with'),
    ('rollout.max_batches=0', 'rollout.max_batches=0 must be at least 1'),
    ('rollout.band_mix=1.5', 'rollout: .*needs 0 < mix < 1'),
])  # fmt: skip
def test_impossible_settings_stop_before_any_run(override, message):
    with pytest.raises(wiring.ConfigError, match=message):
        compare.build(['--config=configs/alfworld_gigpo.py:smoke', f'--config.{override}'])


def result(variant: str, seed: int, after: float, *, start: float = 20.0) -> results.Result:
    """A result file's content: two splits, two evaluations, four updates."""
    def evaluation(update, rate):
        return {'update': update} | {f'eval/{split}/success_rate{kind}': rate / 100 + shift
                                     for split, shift in (('valid_seen', 0.0), ('valid_unseen', 0.02))
                                     for kind in ('', '/look', '/pick')}

    return {
        'experiment': variant, 'preset': 'tiny', 'seed': seed, 'config': {'seed': seed}, 'commit': 'abc', 'date': '2026-01-02',
        'machine': 'a machine', 'evaluations': [evaluation(0, start), evaluation(4, after)],
        'curves': {'rollout/success_rate': [0.1, 0.2, 0.3, after / 100], 'group/all_failed_share': [0.5, 0.5, 0.3, 0.3],
                   'gate/triggered_share': [0.1] * 4, 'gate/step/zero_score': [5.0, 5, 5, 5], 'gate/step/groups': [10.0, 10, 10, 10],
                   'time/save_s': [None, 1.0, 1.0, 1.0]}}


EVERYTHING = [result('gigpo', seed, after) for seed, after in enumerate((30, 40, 50))] + [
    result('gigpo+covgpo', seed, after) for seed, after in enumerate((33, 41, 55))] + [result('hgpo', 0, 25)]


def test_differences_are_paired_by_seed_with_student_intervals():
    runs = compare_tables.by_variant(EVERYTHING)
    values = compare_tables.paired(runs['gigpo+covgpo'], runs['gigpo'], compare_tables.final_mean)
    np.testing.assert_allclose(values, [3, 1, 5])
    mean, half = results.interval(values)
    assert mean == pytest.approx(3) and half == pytest.approx(4.302653 * 2 / np.sqrt(3), abs=1e-5)  # t(0.975, 2)
    assert results.interval([1.0]) == (1.0, float('inf'))
    del runs['gigpo'][1]  # a seed that only one of them has does not count
    np.testing.assert_allclose(
        compare_tables.paired(runs['gigpo+covgpo'], runs['gigpo'], compare_tables.final_mean), [3, 5])


def test_tables_and_picture(tmp_path):
    text = compare_tables.write(EVERYTHING, tmp_path, reference='')
    rows = {line.split('|')[1].strip(' `'): line for line in text.splitlines() if line.startswith('| `')}
    assert text.count('| `gigpo+covgpo` |') == 3  # main, by type, failures
    assert '| `gigpo+covgpo` | 3 | 20.0 → 43.0 ± 11.1 | 22.0 → 45.0 ± 11.1 | 43.0 ± 11.1 | `gigpo` | +3.0 [-2.0, +8.0] |' in text
    assert '| `hgpo` | 1 | 20.0 → 25.0 | 22.0 → 27.0 | 25.0 | – | – | – |' in text
    assert rows['hgpo'].split('|')[2:6] == [' 40 ', ' 10 ', ' 50 ', ' – ']  # the last table: no trajectory level here
    assert (tmp_path / 'table.md').read_text().strip() in text and (tmp_path / 'curves.png').stat().st_size > 10_000
    with pytest.raises(ValueError, match="no results of the reference 'grpo'; there are gigpo"):
        compare_tables.write(EVERYTHING, tmp_path, reference='grpo')
    assert '`gigpo` | +' in compare_tables.write(EVERYTHING, tmp_path, reference='gigpo')


def test_a_file_that_is_no_result_is_named(tmp_path):
    for content, message in (('{}', 'lacks config, curves'), ('{"a', 'x.json')):
        (tmp_path / 'x.json').write_text(content)
        with pytest.raises(ValueError, match=message):
            results.read(tmp_path / 'x.json')


def run(tmp_path, *arguments):
    command = [sys.executable, '-m', 'experiments.compare', '--config=configs/alfworld_gigpo.py:smoke', '--name=t', '--seeds=1',
               f'--runs={tmp_path}/runs', '--config.updates=1', '--config.env.num_valid=6', '--config.env.num_workers=0', *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False,
                          env=os.environ | {'PYTHONPATH': str(ROOT)})


def test_a_comparison_runs_resumes_and_refuses_other_settings(tmp_path):
    """Real runs. The second call finds one file, makes the other; the third one's settings are not those of the files."""
    (tmp_path / 'configs').symlink_to(ROOT / 'configs')
    first = run(tmp_path, '--variants=gigpo+shuffle')
    assert first.returncode == 0, first.stderr[-2000:]
    file = tmp_path / 'results' / 't' / 'gigpo+shuffle-seed0.json'
    recorded = json.loads(file.read_text())
    assert recorded['config']['coverage']['variant'] == 'shuffle' and len(recorded['curves']['gate/step/repair']) == 1
    before = file.stat().st_mtime_ns
    second = run(tmp_path, '--variants=gigpo+shuffle,gigpo')
    assert '1 runs are there, 1 to make' in second.stdout and '`gigpo` | ' in second.stdout
    assert file.stat().st_mtime_ns == before
    third = run(tmp_path, '--variants=gigpo', '--config.advantage.discount=0.5')
    assert third.returncode and 'advantage.discount 0.95 -> 0.5' in third.stderr and 'Traceback' not in third.stderr


def test_a_failing_run_shows_its_log_and_the_others_go_on(tmp_path):
    compare._IN_SWEEP.clear()
    bad = ['--config=configs/alfworld_gigpo.py:smoke', '--config.model.path=nowhere']
    errors = compare.sweep([(tmp_path / 'a-seed0.json', bad), (tmp_path / 'b-seed0.json', bad)], tmp_path / 'runs', jobs=2)
    assert len(errors) == 2 and all('there is no model in nowhere' in error for error in errors)


def test_without_git_the_commit_is_unknown(monkeypatch, tmp_path):
    monkeypatch.setenv('PATH', str(tmp_path))
    assert results.commit() == 'unknown'
