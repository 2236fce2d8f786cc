"""The check of an accelerator, on the CPU with tiny shapes: it runs as a whole, and its figures are of what ran."""

from __future__ import annotations

import json

import pytest

from experiments import gpu_check

SMALL = ['--config=configs/alfworld_gigpo.py:smoke', '--matmul=64', '--rounds=1', '--config.prompt.buckets=(64,)',
         '--config.rollout.row_buckets=(4,)', '--config.learner.minibatch=8', '--config.mesh.fsdp=1']


def test_the_whole_check_runs(tmp_path):
    record = gpu_check.main([*SMALL, f'--out={tmp_path / "out.json"}', '--config.learner.pack_length=128'])
    assert json.loads((tmp_path / 'out.json').read_text()) == record
    exact, rounded = record['parity']['float32'], record['parity']['bfloat16']
    for found in (exact, rounded):  # one and the same device here
        assert found['logprob_max'] == 0 and found['gradient_relative'] == 0 and found['greedy_replies_equal'] == found['greedy_replies'] > 0
    assert record['train']['rows'] == 8 and 0 <= record['train']['pad_fraction'] < 1
    assert record['sample']['new_tokens'] == 4 * 16  # nothing ends early
    for part in ('train', 'sample'):
        assert record[part]['mfu'] > 0 and record[part]['tokens_per_s'] > 0 and record[part]['peak_gib'] > 0


def test_what_the_time_does_not_allow_is_left_out_and_said(tmp_path, capsys):
    record = gpu_check.main([*SMALL, f'--out={tmp_path / "out.json"}', '--budget_s=-1'])
    assert 'train' not in record and 'train is left out' in capsys.readouterr().out


def test_a_stray_flag_is_named(capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(['--rows=3'])
    assert '--rows=3' in capsys.readouterr().err
