"""The diagnostics show what runs logged, pool it exactly, and name what is missing. Real metrics, files, figures."""

from __future__ import annotations

import functools
import json
import pathlib

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import image
from table_examples import random_groups

from covsero_jax import advantages, coverage, groups, metrics
from experiments import diagnostics, results

ROOT = pathlib.Path(diagnostics.__file__).parents[1]
UPDATES = 9
TYPES = ('look', 'place', 'heat')
TIMES = {'time/rollout_s': 4.0, 'time/advantages_s': 0.5, 'time/old_logprobs_s': 2.0, 'time/learn_s': 3.0,
         'time/save_s': 0.5, 'time/evaluate_s': 90.0}


@functools.partial(jax.jit, static_argnames='scale')
def gate_metrics(table, scale):
    config = coverage.CoverageConfig(coverage_scale=scale)
    compare = coverage.with_coverage(advantages.make_compare(table), table, config)
    return coverage.gate_metrics(advantages.ESTIMATORS['gigpo'](table, compare)[1])


@functools.cache
def logged(scale: float) -> tuple[dict[str, float], ...]:
    """The metrics of UPDATES updates of random groups, with an estimator's real gates."""
    rows = []
    for update in range(UPDATES):
        batch = random_groups(update)
        table = groups.build_step_table(batch, discount=0.95, goal_discount=0.5, history_depth=3, num_rows=128)
        gate = {f'gate/{name}': float(value) for name, value in jax.device_get(gate_metrics(table, scale)).items()}
        triggered, total = (
            sum(gate[f'gate/{level}/{what}'] for level in diagnostics.LEVELS) for what in ('triggered', 'groups'))
        gate['gate/triggered_share'] = triggered / total
        rows.append({**metrics.rollout_metrics(batch, TYPES), **gate, **TIMES})
    return tuple(rows)


def write_run(folder: pathlib.Path, rows, *, experiment: str = 'covgpo', seed: int = 0) -> pathlib.Path:
    writer = metrics.MetricsWriter(folder, resume_from=0)
    writer.write(0, {'eval/valid_seen/success_rate': 0.5})
    for update, row in enumerate(rows, start=1):
        writer.write(update, row)
    writer.close()
    config = {'experiment': experiment, 'preset': 'tiny', 'seed': seed, 'updates': len(rows)}
    (folder / 'config.json').write_text(json.dumps(config))
    return folder


def cells(table: str) -> dict[str, list[str]]:
    """First cell -> the others, of the lines below the head."""
    lines = [line[2:-2].split(' | ') for line in table.replace('\\|', '/').splitlines()]
    assert {len(line) for line in lines[:1] + lines[2:]} == {len(lines[0])}
    return {line[0]: line[1:] for line in lines[2:]}


@pytest.fixture
def run(tmp_path) -> pathlib.Path:
    return write_run(tmp_path / 'run', logged(0.3))


def test_updates_log_all_that_is_needed():
    """Section 10.8 is whole: nothing the tables show is missing from what the metrics' functions return."""
    rows = logged(0.3)
    run = diagnostics.Run('', np.arange(UPDATES), {name: np.array([row[name] for row in rows]) for name in rows[0]})
    assert run.missing() == [] and run.types() == set(TYPES)
    assert (run.curve('gate/step/triggered') > 0).any() and (run.curve('group/all_failed') > 0).any()
    assert diagnostics.DASH not in diagnostics.progress_table([run])
    assert [name for name, (cell,) in cells(diagnostics.runtime_table([run])).items() if cell == diagnostics.DASH] == []


@pytest.mark.parametrize('name', [*diagnostics.NEEDED, diagnostics.BY_TYPE])
def test_each_curve_that_is_missing_shows_as_a_dash_and_is_named(tmp_path, name):
    gone = {key for key in logged(0.3)[0] if key == name or name == diagnostics.BY_TYPE and key.startswith(name)}
    rows = [{key: value for key, value in row.items() if key not in gone} for row in logged(0.3)]
    run = diagnostics.read_run(write_run(tmp_path, rows))
    shown = diagnostics.progress_table([run]) + str(list(cells(diagnostics.runtime_table([run])).values()))
    assert f'| {diagnostics.DASH} ' in shown or f"['{diagnostics.DASH}']" in shown
    (note,) = diagnostics.notes([run])
    assert name.rstrip('/') in note


def test_pooled_shares_are_ratios_of_sums(run):
    rows = logged(0.3)[4:7]
    shown = cells(diagnostics.runtime_table([diagnostics.read_run(run)], until=7, pool=3))
    total = {name: sum(row[name] for row in rows) for name in rows[0]}
    assert shown['updates'] == ['5–7'] and shown['all-failed task groups'] == [f'{total["group/all_failed"]:.0f}']
    for kind in TYPES:
        share = 100 * total[f'group/all_failed/{kind}'] / total['group/all_failed']
        assert shown[f'P({kind} / all-failed) %'] == [f'{share:.1f}']
    share = 100 * total['gate/step/triggered'] / total['gate/step/groups']
    assert shown['step groups: triggered %'] == [f'{share:.1f}']
    assert shown['step groups: lambda_eff'] == [f'{total["gate/step/scale"] / 3:.3f}']


def test_the_categories_of_the_failures_add_up(run):
    shown = cells(diagnostics.runtime_table([diagnostics.read_run(run)]))
    shares = [float(cell[0]) for name, cell in shown.items() if name.startswith('P(')]
    assert len(shares) == len(TYPES) and sum(shares) == pytest.approx(100, abs=0.2)


def test_evaluation_is_no_part_of_an_iteration(run):
    shown = cells(diagnostics.runtime_table([diagnostics.read_run(run)]))
    assert shown['advantage computation, s'] == ['0.5000'] and shown['iteration, s'] == ['10.00']
    assert shown['advantage computation, % of iteration'] == ['5.00']


def test_phases_that_some_updates_lack_count_as_nothing(tmp_path):
    """The first update saves nothing that its line could hold."""
    rows = [dict(row) for row in logged(0.3)]
    del rows[0]['time/save_s']
    run = diagnostics.read_run(write_run(tmp_path, rows))
    np.testing.assert_allclose(run.iteration_seconds(), [9.5] + [10.0] * (UPDATES - 1))
    assert run.missing() == []


def test_the_update_that_compiles_decides_no_time(tmp_path):
    rows = list(logged(0.3))
    rows[0] = rows[0] | {'time/advantages_s': 60.0, 'time/learn_s': 90.0}
    shown = cells(diagnostics.runtime_table([diagnostics.read_run(write_run(tmp_path, rows))]))
    assert (shown['advantage computation, s'], shown['iteration, s']) == (['0.5000'], ['10.00'])


def test_repair_and_coverage_are_conditional(tmp_path):
    """Zeros that stand for 'there were none' never enter a mean."""
    rows = [dict(row) for row in logged(0.0)]
    rows[0] |= {'rollout/success_rate': 0.0, 'coverage/successful': 0.0}
    rows[1] |= {'rollout/success_rate': 1.0, 'coverage/failed': 0.0}
    run = diagnostics.read_run(write_run(tmp_path, rows))
    assert np.isnan(run.repair('step')).all() and (run.share('step', 'triggered') == 0).all()
    assert np.isnan(run.coverage('successful')[0]) and run.coverage('failed')[0] == rows[0]['coverage/failed']
    assert np.isnan(run.coverage('failed')[1]) and run.coverage('successful')[1] == rows[1]['coverage/successful']
    shown = cells(diagnostics.runtime_table([run]))
    assert shown['step groups: /repair/ where triggered'] == [diagnostics.DASH]
    assert shown['step groups: triggered %'] == ['0.0']


def test_progress_is_the_smoothed_curve_at_the_updates_asked_for(run):
    loaded = diagnostics.read_run(run)
    success = [row['rollout/success_rate'] for row in logged(0.3)]
    expected = {1: success[:3], 4: success[1:6], 9: success[6:]}
    lines = diagnostics.progress_table([loaded], [1, 4, 9, 150]).splitlines()[2:]
    assert [line.split(' | ')[1] for line in lines] == ['1', '4', '9']
    means = [f'{100 * np.mean(window):.1f} |' for window in expected.values()]
    assert [line.split(' | ')[-1] for line in lines] == means
    lines = diagnostics.progress_table([loaded]).splitlines()[2:]
    assert [line.split(' | ')[1] for line in lines] == ['1', '3', '5', '7', '9']
    assert diagnostics.notes([loaded], [9, 150]) == ['note: covgpo, seed 0: has no update 150 (its last is 9)']


VALUES = st.lists(st.floats(0, 1) | st.just(float('nan')), min_size=12, max_size=12).map(np.array)


@settings(deadline=None)
@given(VALUES, st.floats(-3, 3))
def test_smoothing_stays_inside_its_window_and_moves_with_the_curve(value_U, shift):
    smooth_U = diagnostics.smooth(value_U)
    for u, smoothed in enumerate(smooth_U):
        window = value_U[max(0, u - 2):u + 3]
        window = window[np.isfinite(window)]
        assert np.isnan(smoothed) if not window.size else window.min() - 1e-12 <= smoothed <= window.max() + 1e-12
    np.testing.assert_allclose(diagnostics.smooth(value_U + shift), smooth_U + shift, atol=1e-12)
    np.testing.assert_allclose(diagnostics.smooth(value_U[::-1]), smooth_U[::-1], atol=1e-12)
    np.testing.assert_array_equal(diagnostics.smooth(np.full(12, 0.25)), 0.25)


def test_a_result_file_shows_what_its_run_does(run, tmp_path):
    rows = logged(0.3)
    result = {'experiment': 'covgpo', 'preset': 'tiny', 'seed': 0, 'config': {'updates': UPDATES}, 'evaluations': [],
              'curves': {name: [row[name] for row in rows] for name in rows[0]}}
    result['curves']['group/all_failed_share/look'] = [0.5]
    path = tmp_path / 'result.json'
    path.write_text(json.dumps(result))
    a, b = diagnostics.read_run(run), diagnostics.read_run(path)
    assert diagnostics.runtime_table([a]) == diagnostics.runtime_table([b])
    assert diagnostics.progress_table([a]) == diagnostics.progress_table([b])
    assert b.notes == ('curve group/all_failed_share/look has 1 values for 9 updates and is left out',)


def test_figure_and_tables_of_several_runs(run, tmp_path, capsys):
    other = write_run(tmp_path / 'other', logged(0.0)[:5], experiment='gigpo', seed=3)
    diagnostics.main([str(run), str(other)])
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == f'figure: {tmp_path / "diagnostics.png"}'
    assert '| covgpo, seed 0 | gigpo, seed 3 |' in out
    pixels = image.imread(tmp_path / 'diagnostics.png')[..., :3].reshape(-1, 3)
    for colour in ((31, 119, 180), (255, 127, 14)):  # the first two of tab10
        assert (np.abs(pixels - np.array(colour) / 255).max(axis=1) < 0.01).sum() > 1000


def test_runs_of_one_label_stay_apart(run, tmp_path):
    again = write_run(tmp_path / 'again', logged(0.0))
    labels = [r.label for r in diagnostics.read_runs([run, again])]
    assert labels == [f'covgpo, seed 0 ({run})', f'covgpo, seed 0 ({again})']


def test_committed_results_are_shown(tmp_path, capsys):
    paths = sorted((ROOT / results.FOLDER).rglob('*-seed0.json'))  # of runs; results/oracle holds other reports
    assert paths
    diagnostics.main([*map(str, paths), f'--out={tmp_path}/figure.png'])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f'figure: {tmp_path}/figure.png' and (tmp_path / 'figure.png').stat().st_size
    assert sum(' | 1 | ' in line for line in lines) == len(paths)  # each has a first update


def test_a_torn_last_line_is_named_and_left_out(run, capsys):
    whole = diagnostics.runtime_table([diagnostics.read_run(run)])
    with (run / 'metrics.jsonl').open('a') as file:
        file.write('{"update": 10, "rollout/succ')
    assert diagnostics.runtime_table([diagnostics.read_run(run)]) == whole
    diagnostics.main([str(run)])
    assert 'note: covgpo, seed 0: the torn last line of metrics.jsonl' in capsys.readouterr().out


GOOD = '{"experiment": "x", "seed": 0}'


@pytest.mark.parametrize(('files', 'message'), [
    ({}, 'is neither a run'),
    ({'config.json': GOOD}, 'is neither a run'),
    ({'config.json': GOOD, 'metrics.jsonl': ''}, 'holds no update yet'),
    ({'config.json': GOOD, 'metrics.jsonl': '{"update": 0, "a/b": 1}\n'}, 'holds no update yet'),
    ({'config.json': '{"experiment": ', 'metrics.jsonl': '{"update": 1, "a/b": 1}\n'}, 'is not what experiments.train'),
    ({'config.json': '{"seed": 0}', 'metrics.jsonl': '{"update": 1, "a/b": 1}\n'}, r"KeyError\('experiment'\)"),
])
def test_a_bad_run_is_one_clear_line(tmp_path, files, message):
    folder = tmp_path / 'bad'
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.raises(SystemExit, match=message) as error:
        diagnostics.main([str(folder)])
    assert str(folder) in str(error.value) and '\n' not in str(error.value)
    assert not (tmp_path / 'diagnostics.png').exists()


@pytest.mark.parametrize('text', [
    '', '[1]', '{"curves": {}}', '{"config": {"updates": 1}, "curves": {"a": ["x"]}}', 'PNG'])
def test_a_bad_file_is_one_clear_line(tmp_path, text):
    path = tmp_path / 'bad.json'
    path.write_text(text)
    with pytest.raises(SystemExit, match='is not what experiments.train or experiments.results wrote'):
        diagnostics.main([str(path)])


@pytest.mark.parametrize('flag', ['--at=0', '--at=10;20', '--at=', '--until=0', '--pool=-1'])
def test_bad_flags_are_refused(run, flag, capsys):
    with pytest.raises(SystemExit):
        diagnostics.main([str(run), flag])
    assert 'is not a number of updates' in capsys.readouterr().err
