"""config.debug.check_invariants: a gate that breaks one of its promises stops the training loop's advantage program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from table_examples import group, trajectory

from configs import base
from covsero_jax import coverage, groups, learner
from experiments import train, wiring

CONFIG = base.get_config('smoke')
CONFIG.advantage.estimator = 'gigpo'
CONFIG.coverage.variant, CONFIG.coverage.mode = 'covgpo', 'ideal'


def make_table() -> groups.StepTable:
    """Rows 0-8: all failed, gate open at the task level. Rows 9-11: a success and a failure. Then padding."""
    failed = group(trajectory('abcb'), trajectory('aabc'), trajectory('aaaa'))
    mixed = group(trajectory('xyz', success=True), trajectory('xx'))
    return groups.build_step_table([failed, mixed], num_rows=16, discount=0.95, goal_discount=0.1, history_depth=3)


def at(row: int, x_N, change: float):
    return jnp.asarray(x_N) + jnp.float32(change) * (jnp.arange(x_N.shape[0]) == row)


BREAKS = {  # what a wrong implementation would do to a comparison -> the invariant that it breaks
    'always on: an informative group gets a bonus': ('(a)', lambda c: c.replace(advantage_N=at(9, c.advantage_N, 0.1))),
    'a group that the base can order is opened': (
        '(b)', lambda c: c.replace(gate=c.gate.replace(open_N=c.id_N >= 0))),
    'the fallback is not centred': ('(c)', lambda c: c.replace(advantage_N=c.advantage_N + 0.01 * c.gate.open_N)),
    'the fallback is not normalised': (
        '(c)', lambda c: c.replace(advantage_N=jnp.where(c.gate.open_N, 3 * c.advantage_N, c.advantage_N))),
    'a division by zero': ('(d)', lambda c: c.replace(advantage_N=at(2, c.advantage_N, np.nan))),
    'padding is credited': ('(e)', lambda c: c.replace(advantage_N=at(14, c.advantage_N, 0.1))),
}  # fmt: skip


def advantage_program(monkeypatch, config, break_it=None):
    honest = coverage.with_coverage

    def with_coverage(*arguments):
        gated = honest(*arguments)
        return lambda *a, **k: break_it(gated(*a, **k)) if a[0] == 'trajectory' else gated(*a, **k)

    if break_it is not None:
        monkeypatch.setattr(coverage, 'with_coverage', with_coverage)
    model_config = wiring.load_policy(config).config
    optimizer = learner.make_optimizer(wiring.optimizer_config(config))
    return train.make_programs(config, model_config, optimizer, wiring.make_mesh(config)).advantages


@pytest.mark.parametrize('what', BREAKS)
def test_a_broken_gate_stops_the_loop(monkeypatch, what):
    invariant, break_it = BREAKS[what]
    program = advantage_program(monkeypatch, CONFIG, break_it)
    with pytest.raises(AssertionError) as caught:
        program(make_table(), jax.random.key(0))
    assert invariant in str(caught.value)


def test_without_the_check_it_would_pass_unseen(monkeypatch):
    config = base.get_config('smoke')
    config.coverage.variant, config.debug.check_invariants = 'covgpo', False
    program = advantage_program(monkeypatch, config, BREAKS['padding is credited'][1])
    assert program(make_table(), jax.random.key(0))[0][14] != 0


def test_an_honest_gate_passes(monkeypatch):
    advantage_N, gate_N, _ = advantage_program(monkeypatch, CONFIG)(make_table(), jax.random.key(0))
    assert gate_N[:9].all() and not gate_N[9:].any() and (advantage_N[12:] == 0).all()
